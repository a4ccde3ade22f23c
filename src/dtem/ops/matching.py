"""Hard grouping: bipartite soft matching of tokens (ToMe, Bolya et al. 2023, https://arxiv.org/abs/2210.09461).

Tokens are split by absolute position: even ones are set A, odd ones set B; prefix tokens are in neither.
Every A token has an edge to its most similar B token, and the r strongest edges are merged.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.hooks import is_watched
from dtem.ops import kernel

#: Most similarities that `strongest` computes at a time on a CPU (4 MB; on other devices 64 times as many).
SIMILARITIES = 1 << 20


@dataclass(frozen=True)
class Matching:
    """Result of matching. Positions in `kept` and `merged` refer to the input, those in `into` to the output."""

    kept: Int[Tensor, "b left"]
    """Tokens that are kept, in output order: prefix, kept A, then B."""
    merged: Int[Tensor, "b r"]
    """A tokens that are merged, strongest edge first."""
    into: Int[Tensor, "b r"]
    """The B token that each of them is merged into, as a position in the output."""

    @property
    def source(self) -> Int[Tensor, "b n"]:
        """Source map: for each input token, the output token that holds it."""
        batch, kept = self.kept.shape
        source = self.kept.new_empty(batch, kept + self.merged.shape[1])
        here = positions(batch, kept, source.device)
        return source.scatter(1, self.kept, here).scatter(1, self.merged, self.into)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable autocast: cosines in half precision would have many ties."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def limit(patches: int) -> int:
    """Largest number of tokens that one merge can remove: half of the patches."""
    return patches // 2


def sides(prefix: int) -> tuple[int, int]:
    """First patch position of set A (even) and of set B (odd)."""
    return prefix + prefix % 2, prefix + 1 - prefix % 2


def cosine(z: Float[Tensor, "b n d"], prefix: int, excluded: int = 0) -> Float[Tensor, "b i j"]:
    """Cosine similarity of every A token with every B token, in float32 (float64 stays).

    The last `excluded` tokens are in neither set.
    """
    with full_precision(z.device):
        if z.dtype != torch.float64:
            z = z.float()
        z = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=1e-12)
        a, b = sides(prefix)
        stop = z.shape[1] - excluded
        return torch.bmm(z[:, a:stop:2], z[:, b:stop:2].mT)


def match(metric: Float[Tensor, "b n d"], r: int, prefix: int = 0) -> Matching:
    """Match tokens by the cosine of `metric` and choose the r strongest edges. Ties go to the lower index."""
    batch, tokens, _ = metric.shape
    check_r(r, tokens - prefix)
    if tokens > prefix + 1 and kernel.serves(metric, half=True):
        return Matching(*kernel.match(metric, r, prefix))
    here = positions(batch, tokens, metric.device)
    a, b = sides(prefix)
    b_side = here[:, b::2]
    if not b_side.shape[1]:  # one patch or none: nothing to match
        return Matching(kept=here, merged=here[:, :0], into=here[:, :0])
    best, partner = strongest(metric.detach() if metric.requires_grad else metric, prefix)
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices
    chosen = order[:, :r]
    first = here[:, a : a + 1]
    return Matching(
        kept=torch.cat([here[:, :prefix], first.add(order[:, r:].sort(dim=1).values, alpha=2), b_side], dim=1),
        merged=first.add(chosen, alpha=2),
        into=partner.gather(1, chosen) + (tokens - r - b_side.shape[1]),
    )


def match_real(metric: Float[Tensor, "b n d"], real: Bool[Tensor, "b n"], r: int, prefix: int = 0) -> Matching:
    """`match` where some tokens are padding (not `real`) and at the end: the real ones match as they would without it.

    An image with fewer than r real A tokens loses padding for the rest. What is kept has its padding at the end again.
    """
    batch, tokens, _ = metric.shape
    check_r(r, tokens - prefix)
    a, b = sides(prefix)
    here = positions(batch, tokens, metric.device)
    similarity = cosine(metric.detach(), prefix).masked_fill(~real[:, None, b::2], -2.0)  # below every cosine
    best, partner = similarity.masked_fill(~real[:, a::2, None], -3.0).max(dim=-1)  # of padding: the first B token
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices
    chosen, first = order[:, :r], here[:, a : a + 1]
    kept = torch.cat([here[:, :prefix], first + 2 * order[:, r:].sort(dim=1).values, here[:, b::2]], dim=1)
    order = torch.sort((~real.gather(1, kept)).to(torch.uint8), dim=1, stable=True).indices
    into = partner.gather(1, chosen) + (tokens - r - here[:, b::2].shape[1])
    return Matching(kept=kept.gather(1, order), merged=first + 2 * chosen, into=order.argsort(dim=1).gather(1, into))


def strongest(z: Float[Tensor, "b n d"], prefix: int) -> tuple[Float[Tensor, "b i"], Int[Tensor, "b i"]]:
    """The largest cosine of every A token with a B token, and the index of that B token.

    A block of A tokens at a time: for long inputs, all similarities at once would be more memory than a block needs.
    """
    with full_precision(z.device):
        if z.dtype != torch.float64:
            z = z.float()
        z = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_(min=1e-12)
        a, b = sides(prefix)
        a_side, b_side = z[:, a::2], z[:, b::2].mT
        if torch.compiler.is_compiling():
            return torch.bmm(a_side, b_side).max(dim=-1)
        most = SIMILARITIES if z.is_cpu else 64 * SIMILARITIES
        rows = max(1, most // (z.shape[0] * b_side.shape[2]))
        blocks = [torch.bmm(block, b_side).max(dim=-1) for block in torch.split(a_side, rows, dim=1)]
        if len(blocks) == 1:
            return blocks[0]
        best, partner = zip(*blocks, strict=True)
        return torch.cat(best, dim=1), torch.cat(partner, dim=1)


def positions(batch: int, tokens: int, device: torch.device) -> Int[Tensor, "b n"]:
    """0, 1, 2, … for every image. Cached by shape: at batch 1, small kernels are most of the cost of merging.

    What is made while something watches (fake tensors, the memory of a CUDA graph) is not kept for others.
    """
    make = _positions if is_watched() else _positions_once
    return make(batch, tokens, device)


def _positions(batch: int, tokens: int, device: torch.device) -> Int[Tensor, "b n"]:
    with torch.inference_mode(False):  # a cached inference tensor could not be used in a backward pass later
        return torch.arange(tokens, device=device).expand(batch, -1)


_positions_once = functools.lru_cache(maxsize=256)(_positions)


def compose(source: Int[Tensor, "b p"], step: Int[Tensor, "b n"]) -> Int[Tensor, "b p"]:
    """Compose a source map with that of one more step. Dropped patches (−1) stay dropped."""
    return step.gather(1, source.clamp(min=0)).masked_fill(source < 0, -1)


def check_r(r: int, patches: int) -> None:
    """Refuse an r outside the possible range: operators do not clamp, schedules do."""
    if not 0 <= r <= limit(patches):
        raise DtemError(
            f"r = {r} tokens cannot be removed from {patches} patches: one merge removes 0 to {limit(patches)} "
            "(at most half). A schedule (dtem.schedule) clamps r; operators do not."
        )
