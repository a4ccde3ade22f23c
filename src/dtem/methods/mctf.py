"""MCTF: fuse tokens that are similar, uninformative and small, in both directions.

Lee et al., "Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers", CVPR 2024,
https://arxiv.org/abs/2403.10030. With x the tokens before a block, m their sizes, A_hqi the attention of that block
(one step ahead of x) from token q to token i in head h, and H heads and n tokens:

    informativeness  a_i = 1/(H n) Σ_hq A_hqi
    attraction       W_ij = ((cos(x_i, x_j) + 1) / 2)^(1/τ_sim) · (a_i a_j)^(−1/τ_info) · (m_i m_j)^(−1/τ_size)
    fusion           the a_i m_i-weighted mean of a group

Patches are split as in ToMe. ⌊r/2⌋ tokens of set A are fused into the B token of strongest attraction, then the other
half goes back: tokens of B, with what they received, into the A token of strongest attraction among those that stay.

a needs all rows of the attention matrix, which fused attention does not give: it is computed once more
(H n² e multiply-adds, counted), though in the blocks that reduce only. τ = 1, 20, 40 as published.

Differences from the publication. There tokens are fused before attention, whose matrix for the fused tokens is
approximated by that of all tokens, rows averaged and columns added. Here attention runs exactly, and tokens are fused
after it by the same choice and weights; the published average of rows is then exact, and values and projection are
computed (and counted) for the fused tokens too. Published: no fusion before the first block and r = 16 before every
other one (`schedule`); here block l fuses after its attention, and a budget is spread over the same blocks. The
published fine-tuning (token reduction consistency) is left out.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method, check_flag, full_size
from dtem.ops.matching import check_r, full_precision, positions
from dtem.types import Taps, Tokens


@dataclasses.dataclass(frozen=True)
class MctfConfig(Config):
    """Settings of MCTF. A τ of 0 leaves its criterion out."""

    tau_sim: float = 1.0
    """τ of similarity."""
    tau_info: float = 20.0
    """τ of informativeness."""
    tau_size: float = 40.0
    """τ of size."""
    bidirectional: bool = True
    """Half of r from A to B and half back; False: all of r from A to B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_sim", "tau_info", "tau_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise DtemError(f"{name} = {value!r} must be a number, 0 or more")
        check_flag("bidirectional", self.bidirectional)


class Mctf(Method):
    """Fusion by three criteria. Nothing is trained."""

    name: ClassVar[str] = "mctf"
    needs: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    config_class: ClassVar[type[Config]] = MctfConfig
    config: MctfConfig

    @property
    def budget_blocks(self) -> tuple[int, ...] | None:
        return tuple(range(1, self.host.depth)) or None

    def before(self, layer: int, tokens: Tokens, r: int) -> Tokens:
        return tokens.replace(carry={"x": tokens.x.detach()}) if r else tokens

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        size = full_size(tokens)
        informative = received_attention(taps, self.bias(tokens))
        step = fusion_groups(tokens.carry["x"], informative, size, r, self.host.prefix, self.config)
        left = tokens.x.shape[1] - r
        x = ops.pool(tokens.x, informative * size, step, left)
        source = None if tokens.source is None else ops.compose(tokens.source, step)
        return tokens.replace(x=x, size=ops.pool_sizes(size, step, left), source=source, carry={})


@torch.no_grad()
def fusion_groups(
    metric: Float[Tensor, "b n c"],
    informative: Float[Tensor, "b n"],
    size: Float[Tensor, "b n"],
    r: int,
    prefix: int,
    config: MctfConfig,
) -> Int[Tensor, "b n"]:
    """For each token the index of its new token: prefix, A tokens that stay, B tokens that stay."""
    batch, tokens, _ = metric.shape
    check_r(r, tokens - prefix)
    to_b = r // 2 if config.bidirectional else r
    to_a = r - to_b
    attraction = log_attraction(metric, informative, size, prefix, config)
    best, partner = attraction.max(dim=2)
    order = torch.sort(best, dim=1, descending=True, stable=True).indices
    gone_a, kept_a = order[:, :to_b], order[:, to_b:].sort(dim=1).values
    here = positions(batch, tokens, metric.device)
    kept_b = back = here[:, : attraction.shape[2]]
    if to_a:
        best, back = ops.take(attraction, kept_a).max(dim=1)
        order = torch.sort(best, dim=1, descending=True, stable=True).indices
        kept_b = order[:, to_a:].sort(dim=1).values
    stay_a, stay_b = kept_a.shape[1], kept_b.shape[1]
    new_b = (back + prefix).scatter(1, kept_b, here[:, prefix + stay_a : prefix + stay_a + stay_b])
    new_a = torch.empty_like(partner).scatter(1, kept_a, here[:, prefix : prefix + stay_a])
    new_a = new_a.scatter(1, gone_a, new_b.gather(1, partner.gather(1, gone_a)))
    a, b = ops.sides(prefix)
    step = here.clone()
    step[:, a::2] = new_a
    step[:, b::2] = new_b
    return step


def log_attraction(
    metric: Float[Tensor, "b n c"],
    informative: Float[Tensor, "b n"],
    size: Float[Tensor, "b n"],
    prefix: int,
    config: MctfConfig,
) -> Float[Tensor, "b i j"]:
    """log W of every A token with every B token."""
    a, b = ops.sides(prefix)
    with full_precision(metric.device):
        z = normalize(metric if metric.dtype == torch.float64 else metric.float(), dim=-1)
        z_a, z_b = z[:, a::2], z[:, b::2]
        total = z.new_zeros(len(z), z_a.shape[1], z_b.shape[1])
        if config.tau_sim:
            similarity = (torch.bmm(z_a, z_b.mT) + 1) / 2
            total = similarity.clamp(min=torch.finfo(z.dtype).tiny).log() / config.tau_sim
        for tau, value in ((config.tau_info, informative), (config.tau_size, size)):
            if tau:
                share = value.to(z.dtype).log() / tau
                total = total - share[:, a::2, None] - share[:, None, b::2]
        return total


@torch.no_grad()
def received_attention(taps: Taps, bias: Float[Tensor, "b n"] | None) -> Float[Tensor, "b n"]:
    """Attention that each token receives, averaged over heads and queries; in float32 (float64 stays). Positive."""
    q, k = taps.q, taps.k
    with full_precision(q.device):
        if q.dtype != torch.float64:
            q, k = q.float(), k.float()
        logits = (q @ k.transpose(2, 3)) * taps.scale
        weights = (logits if bias is None else logits + bias[:, None, None]).softmax(dim=-1)
        return weights.mean(dim=(1, 2)).clamp(min=torch.finfo(weights.dtype).tiny)


def schedule(r: int = 16, depth: int = 12) -> tuple[int, ...]:
    """The published schedule as one r per block: r tokens in every block but the first.

    Examples:
        >>> dtem.patch(model, "mctf", r=schedule(16))
    """
    return (0,) + (r,) * (depth - 1)
