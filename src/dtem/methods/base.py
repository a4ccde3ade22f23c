"""The interface between reduction methods and host models.

An integration runs every block in the same steps; a method overrides those that it needs:

    tokens = method.before(layer, tokens, r)            set tokens aside, score them, prune between blocks
    tokens, taps = <host attention with method.bias(tokens), residual added>
    tokens = method.reduce(layer, tokens, taps, r)      merge or prune between attention and MLP
    tokens = <host MLP, residual added>
    tokens = method.after(layer, tokens, r)             rejoin tokens that were set aside

After a soft forward, training adds `method.losses(tokens)` to the task's loss, or computes the Fisher loss from
`method.merge_candidates(tokens)`.

The whole state of a forward is in `Tokens`, the method's own part in `Tokens.carry`. A method object holds only its
settings and trained parameters, so it can be shared by threads, checkpointed, compiled and pickled.
A variable-length method (ATS) pads: padding has size 0, which pooling ignores, and is masked by `bias`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.affine import affine_parameters
from dtem.types import SIZE_FLOOR, HostSpec, Taps, Tokens

#: Size of a token that is masked in training: above the floor of `ops.log_size`, below which there is no gradient. The
#: mask m of a token enters attention as m + MASKED, so that the loss has a gradient in m at m = 0 too.
MASKED = 2 * SIZE_FLOOR


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a setting that is none of `allowed`."""
    if value not in allowed:
        raise DtemError(f"{name} = {value!r} is not known; choose one of: {', '.join(allowed)}")


def check_positive(name: str, value: object) -> None:
    """Refuse a setting that is not a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise DtemError(f"{name} = {value!r} must be a positive number")


def check_count(name: str, value: object) -> None:
    """Refuse a setting that is neither a whole number from 1 on nor None."""
    if value is not None and not is_count(value):
        raise DtemError(f"{name} = {value!r} must be a whole number, 1 or more, or None for the default")


def check_flag(name: str, value: object) -> None:
    """Refuse a setting that is neither True nor False."""
    if not isinstance(value, bool):
        raise DtemError(f"{name} = {value!r} must be True or False")


def check_soft_pooling(pooling: str) -> None:
    """Refuse soft mode where the host pools by a maximum (`HostSpec.pooling`)."""
    if pooling in ("max", "avgmax"):
        raise DtemError(f"{pooling} pooling has no soft mode: it reads tokens that merging removes")


def is_count(value: object) -> bool:
    """Whether `value` is a whole number, 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of all methods. The settings of a method extend this."""

    proportional: bool | str | None = None
    """Proportional attention: True (in the host's blocks, but not in a text decoder, as in the paper), "everywhere" (in
    the text decoder too), False, or "train" (in soft mode only). None: "train" for MAE weights, else "everywhere"."""
    norms: bool = False
    """Learn a change of the scales and biases of the host's norms (LN tuning), used while tokens are merged."""
    biases: bool = False
    """Learn a change of the biases of the host's linear layers, used while tokens are merged."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "tolist"):  # a number of numpy or torch
                object.__setattr__(self, field.name, value.tolist())
        for name in ("norms", "biases"):
            check_flag(name, getattr(self, name))
        seed = getattr(self, "seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
            raise DtemError(f"seed = {seed!r} must be a whole number of at most 64 bits")
        if not isinstance(self.proportional, bool) and self.proportional not in ("train", "everywhere", None):
            raise DtemError(
                f"proportional = {self.proportional!r} is not known; choose True, False, 'train', 'everywhere' or None"
            )


class Method(nn.Module):
    """A token-reduction method. `dtem.register_method` adds your own."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Requirements: of the integration input, q, k, v or key_projection; of the host class_token."""
    conserves_size: bool = True
    """Whether token sizes always sum to the initial number of tokens. If not, patches are dropped: they have −1 in the
    source map, and there are no intermediate feature maps."""
    restores: ClassVar[bool] = False
    """Whether a block restores all tokens at its end. Then r is the number of tokens that this block and all later ones
    leave out of their computation."""
    resets_each_block: ClassVar[bool] = False
    """Whether every block starts with all tokens: the limits of r then apply to each block on its own."""
    merges_only: ClassVar[bool] = False
    """Whether a hard step does nothing but merge patches. In the last block before a head that reads the prefix alone,
    r patches are then dropped instead, with the same outcome."""
    variable_length: ClassVar[bool] = False
    """Whether images of one batch keep different numbers of tokens; tokens of size 0 are padding."""
    config_class: ClassVar[type[Config]] = Config

    def __init__(self, host: HostSpec, config: Config) -> None:
        super().__init__()
        self.host = host
        self.config = config
        self.soft = False
        """Differentiable (soft) reduction, for training, instead of hard reduction."""
        if config.norms and not host.norms:
            raise DtemError(
                f"norms = True, but dtem does not know the norms of {host.name} ({host.family}); leave it out"
            )
        self.affine = affine_parameters(host, config.norms, config.biases)
        """Learned changes of the host's norms (and biases); None without any."""

    @classmethod
    def create(cls, host: HostSpec, options: Mapping[str, Any]) -> "Method":
        """Build the method from options by name; unknown options are refused."""
        known = {field.name for field in dataclasses.fields(cls.config_class)}
        for name in options:
            if name not in known:
                raise DtemError(f"method {cls.name!r} has no option {name!r}; it has: {', '.join(sorted(known))}")
        return cls(host, cls.config_class(**options))

    def init_from_host(self, host: nn.Module, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        """Initialise all parameters that start from the host's."""
        if self.affine is not None:
            self.affine.reset(host)
        self.init_from_keys(key_projections)

    def init_from_keys(self, key_projections: list[tuple[Tensor, Tensor | None]]) -> None:
        """Initialise from the host's head-mean key projections: per block, weight (e, c) and bias (e)."""

    def has_soft_mode(self) -> bool:
        """Whether the method has a soft mode."""
        return False

    @property
    def stages(self) -> tuple[int, ...] | None:
        """The blocks in which the method can reduce tokens; None: all."""
        return None

    @property
    def budget_blocks(self) -> tuple[int, ...] | None:
        """The blocks over which a budget is spread, though the method could reduce in others too; None: all."""
        return self.stages

    def schedule(self) -> tuple[int, ...] | None:
        """The r of every block that the method has learned (``r = "learned"``); None: it learns none."""
        return None

    def candidate_plans(self) -> list[tuple[int, ...]] | None:
        """For variable-length methods, whose cost depends on the images: plans by decreasing cost, from which one is
        chosen for a budget. None: the cost of a plan is known without images."""
        return None

    def losses(self, tokens: Tokens) -> dict[str, Tensor]:
        """Auxiliary losses by name, weighted, from the tokens at the end of a soft forward."""
        return {}

    def merge_candidates(self, tokens: Tokens) -> tuple[ops.MergeCandidates, ...]:
        """Candidates for the Fisher loss (`ops.fisher`), from the tokens at the end of a soft forward."""
        return ()

    @property
    def proportional(self) -> bool:
        """Whether attention in the host's blocks is proportional now."""
        return self.soft if self._proportional == "train" else bool(self._proportional)

    @property
    def proportional_decoder(self) -> bool:
        """Whether attention of a text decoder to image tokens is proportional, too."""
        return self._proportional == "everywhere"

    @property
    def _proportional(self) -> bool | str:
        mode = self.config.proportional
        if mode is None:
            mode = "train" if self.host.masked else "everywhere"
        return mode

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        """Bias of the attention logits by key: log sizes, if proportional."""
        if tokens.size is None or not self.proportional:
            return torch.where(tokens.size > 0, 0.0, -torch.inf) if tokens.padded and tokens.size is not None else None
        return ops.log_size(tokens.size) if self.soft else tokens.size.log()  # hard sizes are 1 or more, padding 0

    def class_attention(self, tokens: Tokens, taps: Taps) -> Float[Tensor, "b n"]:
        """Attention of the class token to every token, averaged over heads."""
        return ops.class_attention(taps.q, taps.k, self.bias(tokens), taps.scale).mean(dim=1)

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        """The step before a block."""
        return tokens

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        """The step between attention and MLP."""
        return tokens

    def after(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        """The step after a block."""
        return tokens

    def extra_repr(self) -> str:
        return f"{self.name}, {self.config}"


def merge_matched(tokens: Tokens, metric: Float[Tensor, "b n d"], r: int, prefix: int) -> Tokens:
    """Hard merging by bipartite matching on the cosine of `metric`."""
    if tokens.padded:
        return _merge_real(tokens, metric, r, prefix)
    if ops.is_fused_merge():
        images = torch.arange(tokens.x.shape[0], device=tokens.x.device)
        x, size = ops.fused_merge(tokens.x, tokens.size, metric, images, r, prefix)
        return tokens.replace(x=x, size=size)
    if tokens.source is None:
        x, size = ops.match_and_merge(tokens.x, tokens.size, metric, r, prefix)
        return tokens.replace(x=x, size=size)
    matching = ops.match(metric, r, prefix)
    x, size = ops.merge(tokens.x, tokens.size, matching)
    return tokens.replace(x=x, size=size, source=ops.compose(tokens.source, matching.source))


def _merge_real(tokens: Tokens, metric: Float[Tensor, "b n d"], r: int, prefix: int) -> Tokens:
    """`merge_matched` of tokens with padding: each image merges as it would on its own, and padding fills the rest."""
    size = full_size(tokens)
    matching = ops.match_real(metric, size > 0, r, prefix)
    x, size = ops.merge(tokens.x, size.clamp(min=torch.finfo(size.dtype).tiny), matching)
    source = None if tokens.source is None else ops.compose(tokens.source, matching.source)
    return tokens.replace(x=x, size=torch.where(size < 1, 0.0, size), source=source)


def full_size(tokens: Tokens) -> Float[Tensor, "b n"]:
    """Token sizes: ones where nothing has been merged yet."""
    if tokens.size is not None:
        return tokens.size
    return torch.ones(tokens.x.shape[:2], dtype=torch.float32, device=tokens.x.device)
