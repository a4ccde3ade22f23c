"""Merging where every patch must be there at the end: merge, compute, unmerge.

Each component of a block (attention, MLP) starts with all tokens, each of size 1, and ends with all of them:

    h = norm(x)
    g = method.group(component, h, r)                  r tokens fewer
    y = component(g.x, method.weigh(g))
    x = x + method.ungroup(y, g)                       merged tokens get a copy

In training, all but the last `relaxed` merges are chosen by hard matching, and only those are relaxed. A token that
gave a part of itself away gets that part of its answer from those who received it, so that as τ → 0 this is copying.
Or merges are priced (`ops.pricing`): a component, drawn by a coin, either merges as at inference or offers its merges.
Components are counted through: 2·layer is the attention of block `layer`, 2·layer + 1 its MLP.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.embedding import DecoupledEmbedding
from dtem.methods.base import Config, Method
from dtem.methods.soft import check_count, check_positive, is_count
from dtem.ops import Matching
from dtem.types import DtemError, HostSpec, Tokens


class Grouped(NamedTuple):
    """The input of a component, merged, and how to undo that."""

    x: Float[Tensor, "b m c"]
    size: Float[Tensor, "b m"] | None = None
    """None: nothing was merged."""
    matching: Matching | None = None
    """What was merged hard."""
    edges: Float[Tensor, "b i j"] | None = None
    """What was merged softly after that; tokens stand as prefix, A, B."""
    offer: ops.Offer | None = None
    """What could have been merged, to be priced."""


class DenseMethod(Method):
    """Merging before every component, undone after it."""

    restores: ClassVar[bool] = True
    afresh: ClassVar[bool] = True

    @abstractmethod
    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        """What tokens are compared by (cosine)."""

    def group(self, component: int, h: Float[Tensor, "b n c"], r: int) -> Grouped:
        """The input `h` of a component with r tokens fewer."""
        if r == 0:
            return Grouped(h)
        matching = ops.match(self.metric(component, h), r, self.host.prefix)
        return Grouped(*ops.merge(h, None, matching), matching)

    def weigh(self, grouped: Grouped) -> Float[Tensor, "b m"] | None:
        """What attention adds to the logits, by key: log sizes if proportional. If not, every token that is left counts
        as one, and in training one that gave a part of itself away as what is left of it."""
        size = grouped.size
        if size is not None and not self.proportional:
            size = None if grouped.edges is None else size.clamp(max=1.0)
        if size is None:
            return None
        return size.log() if grouped.edges is None else ops.log_size(size)

    def offers(self, tokens: Tokens) -> tuple[ops.Offer, ...]:
        found: tuple[ops.Offer, ...] = tokens.carry.get("offers", ())
        return found

    def ungroup(self, y: Float[Tensor, "b m c"], grouped: Grouped) -> Float[Tensor, "b n c"]:
        """What the component said, for all tokens."""
        if grouped.edges is not None:
            y = ops.unmerge_along(y, grouped.edges, self.host.prefix)
        return y if grouped.matching is None else ops.unmerge(y, grouped.matching)


class DenseTome(DenseMethod):
    """Tokens are compared by the component's input itself. Nothing is trained."""

    name: ClassVar[str] = "tome"
    needs: ClassVar[frozenset[str]] = frozenset({"input"})

    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        return h


@dataclasses.dataclass(frozen=True)
class DenseDtemConfig(Config):
    """Settings of DTEM for dense prediction."""

    temperature: float = 0.1
    """τ of soft grouping."""
    scale: float = 0.1
    """Similarities are divided by this before soft grouping."""
    candidates: int | None = None
    """Soft grouping sees only each A token's best few B tokens; None: all."""
    relaxed: int = 64
    """In training, the last so many merges of a component are relaxed; those before are chosen by hard matching."""
    priced: bool = False
    """Learn what each merge would do to the output (`ops.pricing`), instead of through relaxed merges."""
    dim: int | None = None
    """Width of the embedding; None: the head width, twice that from width 1024 on (64 and 128 for ViT-T/S/B and L)."""
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers; none: the embedding is one affine layer."""
    seed: int = 0
    """Of the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature", "scale"):
            check_positive(name, getattr(self, name))
        for name in ("candidates", "dim"):
            check_count(name, getattr(self, name))
        if not isinstance(self.priced, bool):
            raise DtemError(f"priced = {self.priced!r} must be True or False")
        if not is_count(self.relaxed):
            raise DtemError(f"relaxed = {self.relaxed!r} must be a whole number, 1 or more: nothing is learned without")
        if not isinstance(self.hidden, tuple) or not all(map(is_count, self.hidden)):
            raise DtemError(f"hidden = {self.hidden!r} must be a tuple of whole numbers, each 1 or more")


class DenseDtem(DenseMethod):
    """Tokens are compared by decoupled embeddings of the component's input: two for each block.

    An embedding of one layer starts as a random projection with orthonormal rows, which nearly keeps the cosines of the
    input: untrained, this is nearly ToMe. (There are no keys to start from beside the MLP.)
    """

    name: ClassVar[str] = "dtem"
    needs: ClassVar[frozenset[str]] = frozenset({"input"})
    config_class: ClassVar[type[Config]] = DenseDtemConfig
    config: DenseDtemConfig

    def __init__(self, host: HostSpec, config: DenseDtemConfig) -> None:
        super().__init__(host, config)
        self.sensing = False
        """Every component offers what it reads and merges nothing, so that training can see what the output makes of
        it (`sense`)."""
        self.dim = config.dim or host.head_dim * (1 if host.width < 1024 else 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embeddings = nn.ModuleList(
                DecoupledEmbedding(host.width, self.dim, config.hidden) for _ in range(2 * host.depth)
            )

    def start(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        if self.config.hidden:
            return
        generator = torch.Generator().manual_seed(self.config.seed)
        for embedding in self.embeddings:
            assert isinstance(embedding, DecoupledEmbedding)
            embedding.copy_keys(torch.eye(self.host.width), None, generator)

    @torch.no_grad()
    def sense(self, found: Sequence[ops.Moments]) -> None:
        """Start from how sensitive the output is to the input of each component (`ops.sensitivity`)."""
        for embedding, each in zip(self.embeddings, found, strict=True):
            assert isinstance(embedding, DecoupledEmbedding)
            weight, bias = ops.distance_embedding(each, self.dim)
            affine = embedding.affine
            if affine is None:
                raise DtemError(f"hidden = {self.config.hidden}: only an embedding of one layer can start by sensing")
            affine.weight.copy_(weight)
            affine.bias.copy_(bias)

    def can_relax(self) -> bool:
        return True

    def metric(self, component: int, h: Float[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        embedded: Tensor = self.embeddings[component](h.detach() if self.soft else h)
        return embedded

    def group(self, component: int, h: Float[Tensor, "b n c"], r: int) -> Grouped:
        config, prefix = self.config, self.host.prefix
        if self.sensing:
            return self._offer(h, h.new_zeros(len(h), 0, 0))
        if r == 0 or not self.soft:
            return super().group(component, h, r)
        if config.priced and torch.randint(2, ()).item():
            return super().group(component, h, r)
        metric = self.metric(component, h)
        if config.priced:
            similarity = ops.cosine(metric, prefix)
            return self._offer(h, ops.soft_group(similarity, r, config.temperature, config.scale, config.candidates))
        soft = min(r, config.relaxed)
        matching = ops.match(metric, r - soft, prefix)
        similarity = ops.kept_rows(ops.cosine(metric, prefix), matching, prefix)
        edges = ops.soft_group(similarity, soft, config.temperature, config.scale, config.candidates)
        merged = ops.merge_along(*ops.merge(h, None, matching), edges, prefix)
        return Grouped(*merged, matching, edges)

    def _offer(self, h: Float[Tensor, "b n c"], edges: Float[Tensor, "b i j"]) -> Grouped:
        """All tokens, and where to read what merging them would do."""
        nudge = torch.zeros_like(h, requires_grad=True)
        ones = torch.ones(h.shape[:2], device=h.device)
        return Grouped(h + nudge, offer=ops.Offer(edges, h.detach(), ones, nudge, self.host.prefix))
