"""Hard grouping: bipartite matching of tokens (ToMe, Bolya et al. 2023, https://arxiv.org/abs/2210.09461).

Tokens are split by absolute position: even ones are side A, odd ones side B, prefix tokens belong to neither.
Every A token points at its most similar B token, and the r strongest of these edges are merged.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.types import DtemError


@dataclass(frozen=True)
class Matching:
    """Which tokens merge, as data. Positions `kept` and `merged` refer to the input, `into` to the output."""

    kept: Int[Tensor, "b n-r"]
    """The tokens that stay, in output order: prefix, kept A, then B."""
    merged: Int[Tensor, "b r"]
    """The A tokens that go, strongest edge first."""
    partner: Int[Tensor, "b r"]
    """The B token that each of them joins."""
    into: Int[Tensor, "b r"]
    """The same B token, as a position in the output."""

    @property
    def source(self) -> Int[Tensor, "b n"]:
        """For each input token, the output token that holds it."""
        batch, kept = self.kept.shape
        source = self.kept.new_empty(batch, kept + self.merged.shape[1])
        here = torch.arange(kept, device=source.device).expand(batch, -1)
        return source.scatter(1, self.kept, here).scatter(1, self.merged, self.into)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No autocast inside: cosines rounded to half precision would tie by the dozen."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def limit(patches: int) -> int:
    """Most tokens that one merge can remove: half of the patches."""
    return patches // 2


def sides(prefix: int) -> tuple[int, int]:
    """First patch position of side A (even) and of side B (odd)."""
    return prefix + prefix % 2, prefix + 1 - prefix % 2


def cosine(
    z: Float[Tensor, "b n d"], prefix: int, excluded: int = 0
) -> Float[Tensor, "b i j"]:
    """Cosine similarity of every A token with every B token, in float32 (float64 stays).

    The last `excluded` tokens are on neither side.
    """
    with full_precision(z.device):
        z = F.normalize(z if z.dtype == torch.float64 else z.float(), dim=-1)
        a, b = sides(prefix)
        stop = z.shape[1] - excluded
        return z[:, a:stop:2] @ z[:, b:stop:2].transpose(1, 2)


def match(
    metric: Float[Tensor, "b n d"], r: int, prefix: int = 0
) -> Matching:
    """Match tokens by the cosine of `metric` and choose the r strongest edges. Ties go to the lower index."""
    batch, tokens, _ = metric.shape
    check_r(r, tokens - prefix)
    a, b = sides(prefix)
    best, partner = cosine(metric, prefix).max(dim=-1)  # (b, i)
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices
    merged = order[:, :r]
    stay = order[:, r:].sort(dim=-1).values
    partner = partner.gather(1, merged)

    positions = torch.arange(tokens, device=metric.device)
    b_side = positions[b::2]
    kept = torch.cat(
        [positions[:prefix].expand(batch, -1), 2 * stay + a, b_side.expand(batch, -1)], dim=1
    )
    return Matching(
        kept=kept,
        merged=2 * merged + a,
        partner=2 * partner + b,
        into=partner + (tokens - r - b_side.shape[0]),
    )


def compose(source: Int[Tensor, "b p"], step: Int[Tensor, "b n"]) -> Int[Tensor, "b p"]:
    """Follow a source map through one more merge."""
    return step.gather(1, source)


def check_r(r: int, patches: int) -> None:
    """Operators refuse an r that cannot be; clamping is the schedule's business."""
    if not 0 <= r <= limit(patches):
        raise DtemError(
            f"r = {r} tokens cannot be removed from {patches} patches: one merge removes 0 to {limit(patches)} "
            "(at most half). A schedule (dtem.schedule) clamps r; operators do not."
        )
