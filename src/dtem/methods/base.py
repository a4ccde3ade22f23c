"""The seam between methods and hosts.

A host's adapter drives every block through the same four steps, and a method fills in those that it needs:

    tokens = method.before(layer, tokens, r)            set tokens aside, score them, prune between blocks
    tokens, taps = <host attention with method.bias(tokens), residual added>
    tokens = method.reduce(layer, tokens, taps, r)      merge or prune between attention and MLP
    tokens = <host MLP, residual added>
    tokens = method.after(layer, tokens, r)             rejoin what was set aside

A soft forward may end in losses of the method's own (`method.losses(tokens)`), which training adds to the task's; and
in offers of merges (`method.offers(tokens)`), whose expected cost then is the loss.

All state of a forward travels in `Tokens` (what is the method's own in `Tokens.carry`), so a method object holds only
its trained parts and settings: it can be shared by threads, checkpointed, compiled and pickled.
A variable-length method (ATS) pads, gives the padding size 0 (pooling passes it over), and masks it in `bias`, which
attention pooling asks too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.types import SIZE_FLOOR, Above, DtemError, HostSpec, Taps, Tokens

#: Size of a token that is masked in training: a little above the floor, under which `ops.log_size` has no gradient. The
#: mask m of a token enters attention as m + MASKED; so what a token would add if it were kept is known at m = 0 too.
MASKED = 2 * SIZE_FLOOR


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings that every method has. A method's own settings extend this."""

    proportional: bool | str | None = None
    """Proportional attention: True (in the host's own blocks; a decoder that reads the tokens counts each once, as in
    the paper), "everywhere" (the decoder counts them by size too), False, or "train" (on in soft training, off at
    inference). None: "train" for MAE weights, "everywhere" for all others."""

    def __post_init__(self) -> None:
        if self.proportional not in (True, False, "train", "everywhere", None):
            raise DtemError(
                f"proportional = {self.proportional!r} is not known; choose True, False, 'train', 'everywhere' or None"
            )


class Method(nn.Module):
    """What reduces tokens."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Of the adapter's taps: input, q, k, v, and for `key_projection` its weights; of the host: class_token."""
    keeps_mass: bool = True
    """Whether token sizes always sum to the number of tokens at the start. If not, patches are dropped: they have −1 in
    the source map, and no intermediate grids exist."""
    restores: ClassVar[bool] = False
    """Whether what a block sets aside is back after it, in its place: then every token is left at the end, and r is how
    many more the block and all later ones leave out of their computation."""
    afresh: ClassVar[bool] = False
    """Whether every block starts with all tokens again: r then counts from all patches in each."""
    adaptive: ClassVar[bool] = False
    """Whether r may be a threshold of similarity (`types.Above`); then `metric(layer, taps)` is what is compared."""
    varies: ClassVar[bool] = False
    """Whether images of one batch are left with different numbers of tokens; sizes of 0 are padding."""
    config_class: ClassVar[type[Config]] = Config

    def __init__(self, host: HostSpec, config: Config) -> None:
        super().__init__()
        self.host = host
        self.config = config
        self.soft = False
        """Relaxed, differentiable merging (training) instead of hard merging."""

    @classmethod
    def create(cls, host: HostSpec, options: Mapping[str, Any]) -> "Method":
        """Build with options by name; an unknown one is refused."""
        known = {field.name for field in dataclasses.fields(cls.config_class)}
        for name in options:
            if name not in known:
                raise DtemError(f"method {cls.name!r} has no option {name!r}; it has: {', '.join(sorted(known))}")
        return cls(host, cls.config_class(**options))

    def start(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        """Initialise trained parts from the host: per block, the head-mean key weight (e, c) and bias (e)."""

    def can_relax(self) -> bool:
        """Whether the method has a soft mode."""
        return False

    @property
    def stages(self) -> tuple[int, ...] | None:
        """The only blocks in which the method can reduce tokens; None: it can in all."""
        return None

    def schedule(self) -> tuple[int, ...] | None:
        """The r of every block that the method has learned (``r = "learned"``); None: it learns none. In soft mode,
        what soft steps run at."""
        return None

    def aim(self, plan: tuple[int, ...], cost: Callable[[tuple[int, ...]], float]) -> object:
        """Get ready to learn rates that cost as much as `plan`; `cost` counts the GFLOPs of any plan. Returns the
        schedule that soft steps are to run at: the plan itself, for methods to which it is the budget."""
        return plan

    def ladder(self) -> list[tuple[int, ...]] | None:
        """Plans from mild to strong, where what a plan costs is known from images only: one of them meets a budget on
        average. None: any plan costs what it counts."""
        return None

    def losses(self, tokens: Tokens) -> dict[str, Tensor]:
        """Losses beside the task's, by name, weighted already; from the tokens at the end of a soft forward."""
        return {}

    def offers(self, tokens: Tokens) -> tuple[ops.Offer, ...]:
        """Merges that a soft forward has offered instead of making them (`ops.pricing`)."""
        return ()

    @property
    def proportional(self) -> bool:
        return self.soft if self._proportional == "train" else bool(self._proportional)

    @property
    def everywhere(self) -> bool:
        """Whether a decoder that reads the tokens counts them by size, too."""
        return self._proportional == "everywhere"

    @property
    def _proportional(self) -> bool | str:
        mode = self.config.proportional
        if mode is None:
            mode = "train" if self.host.masked else "everywhere"
        return mode

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """What is added to every query's logits, by key."""
        if tokens.size is None or not self.proportional:
            return None
        return ops.log_size(tokens.size) if self.soft else tokens.size.log()  # hard sizes are 1 or more

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        return tokens

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        return tokens

    def after(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        return tokens

    def extra_repr(self) -> str:
        return f"{self.name}, {self.config}"


def merge_matched(tokens: Tokens, metric: Float[Tensor, "b n d"], r: int | Above, prefix: int) -> Tokens:
    """Hard bipartite merge of `tokens` by `metric`."""
    if ops.is_whole() and not isinstance(r, Above):
        images = torch.arange(tokens.x.shape[0], device=tokens.x.device)
        x, size = ops.merge_whole(tokens.x, tokens.size, metric, images, r, prefix)
        return tokens.replace(x=x, size=size)
    matching = ops.match(metric, r, prefix)
    if not matching.merged.shape[1]:  # nothing was above a threshold: tokens stay in their order, as at r = 0
        return tokens
    x, size = ops.merge(tokens.x, tokens.size, matching)
    source = None if tokens.source is None else ops.compose(tokens.source, matching.source)
    return tokens.replace(x=x, size=size, source=source)


def full_size(tokens: Tokens) -> Float[Tensor, "b n"]:
    """Sizes, with ones where nothing has been merged yet."""
    if tokens.size is not None:
        return tokens.size
    return torch.ones(tokens.x.shape[:2], dtype=torch.float32, device=tokens.x.device)
