"""ALGM: merge similar neighbours in the first block, similar tokens anywhere in a later one; for dense prediction.

Norouzi et al., "ALGM: Adaptive Local-then-Global Token Merging for Efficient Semantic Segmentation with Plain Vision
Transformers", CVPR 2024, https://arxiv.org/abs/2406.09936. Between attention and MLP of the blocks that reduce:

    first:    local. Windows of 2 × 2 patches by decreasing mean cosine of their 6 pairs; the 4 patches of a window
              become their mean, 3 tokens fewer.
    others:   global. ToMe's bipartite matching, by the cosine of the tokens themselves; size-weighted means.

Merged tokens stay merged up to the last block; then every patch gets a copy of its token, and the decoder runs on all
patches. Attention does not depend on sizes. The published blocks are the first and the fifth of 12.

Differences from the publication. There thresholds decide how many tokens each image merges (windows above 0.88; in the
global step, pairs above the mean of their image by a share of its standard deviation), the published code then takes
the fewest of the batch for all of it. Here r says how many, the most similar first, so an image does not depend on its
batch; where r is no multiple of 3, the last window merges 1 or 2 patches into its last one. One block removes at most
half of the patches, the local step of the publication up to three quarters.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import Config, Method
from dtem.ops.matching import check_r, full_precision, positions
from dtem.types import HostSpec, Taps, Tokens

WINDOW = 2
"""Patches on a side of a local window."""


@dataclasses.dataclass(frozen=True)
class AlgmConfig(Config):
    """Settings of ALGM."""

    proportional: bool | str | None = False
    """Proportional attention; ALGM has none. True, False or None, as for the other methods."""
    stages: tuple[int, ...] | None = None
    """Blocks that reduce, counted from 0; the first of them merges locally. None: the first, and the one a third of the
    depth further on (0 and 4 of 12)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.stages
        if stages is not None and not (
            isinstance(stages, tuple) and stages and all(type(stage) is int and stage >= 0 for stage in stages)
        ):
            raise DtemError(f"stages = {stages!r} must be a tuple of blocks, counted from 0, or None")


class Algm(Method):
    """Local, then global merging. Nothing is trained."""

    name: ClassVar[str] = "algm"
    needs: ClassVar[frozenset[str]] = frozenset({"grid"})
    config_class: ClassVar[type[Config]] = AlgmConfig
    config: AlgmConfig

    def __init__(self, host: HostSpec, config: AlgmConfig) -> None:
        super().__init__(host, config)
        chosen = (0, host.depth // 3) if config.stages is None else config.stages
        self._stages = tuple(sorted(set(chosen)))
        if self._stages[-1] >= host.depth:
            raise DtemError(f"stages = {config.stages}: {host.name} has only the blocks 0 … {host.depth - 1}")
        height, width = host.grid
        windows = (height // WINDOW) * (width // WINDOW)
        if (WINDOW**2 - 1) * windows < host.patches // 2:
            raise DtemError(f"a grid of {height} × {width} patches has too few 2 × 2 windows for algm; use tome")

    @property
    def stages(self) -> tuple[int, ...]:
        return self._stages

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0:
            return tokens
        prefix = self.host.prefix
        local = layer == self._stages[0]
        matching = match_windows(tokens.x, r, self.host.grid, prefix) if local else ops.match(tokens.x, r, prefix)
        x, size = ops.merge(tokens.x, tokens.size, matching)
        source = None if tokens.source is None else ops.compose(tokens.source, matching.source)
        return tokens.replace(x=x, size=size, source=source)


@torch.no_grad()
def match_windows(x: Float[Tensor, "b n c"], r: int, grid: tuple[int, int], prefix: int) -> ops.Matching:
    """Merge patches of the most similar windows into the last patch of each. On ties the first window comes first."""
    batch, tokens, _ = x.shape
    check_r(r, tokens - prefix)
    members = window_members(grid, x.device) + prefix  # (windows, 4)
    count, area = members.shape
    with full_precision(x.device):
        z = x[:, members.reshape(-1)]
        z = normalize(z if z.dtype == torch.float64 else z.float(), dim=-1).view(batch, count, area, -1)
        similarity = (z.sum(dim=2).square().sum(dim=2) - area) / (area * (area - 1))  # the mean over all pairs
    order = torch.sort(similarity, dim=1, descending=True, stable=True).indices
    chosen = members[order]  # (b, windows, 4)
    merged = chosen[:, :, :-1].flatten(1)[:, :r]
    receiver = chosen[:, :, -1:].expand(-1, -1, area - 1).flatten(1)[:, :r]
    stays = torch.ones(batch, tokens, dtype=torch.int64, device=x.device).scatter(1, merged, 0)
    kept = torch.sort(stays, dim=1, descending=True, stable=True).indices[:, : tokens - r]
    return ops.Matching(kept=kept, merged=merged, into=(stays.cumsum(dim=1) - 1).gather(1, receiver))


def window_members(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Patches of each window, row by row, (windows, 4). An odd last row or column is in none."""
    height, width = (side - side % WINDOW for side in grid)
    index = positions(1, grid[0] * grid[1], device)[0].view(grid)[:height, :width]
    return index.unfold(0, WINDOW, WINDOW).unfold(1, WINDOW, WINDOW).flatten(0, 1).flatten(1)
