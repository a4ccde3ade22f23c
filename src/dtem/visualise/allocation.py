"""How the remaining tokens are distributed over foreground and background of an image.

A token that stands for several patches counts for each of them in equal parts. So the tokens on the foreground are
Σ 1/|group of p| over the foreground patches p; foreground and background together make all tokens that hold patches.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtem.errors import DtemError


class Allocation(NamedTuple):
    """Tokens and patches on foreground and background."""

    foreground_tokens: float
    background_tokens: float
    foreground_patches: int
    background_patches: int
    foreground_dropped: int
    """Foreground patches that no token holds any more (methods that prune)."""
    background_dropped: int

    @property
    def share(self) -> float:
        """Share of the tokens on the foreground."""
        tokens = self.foreground_tokens + self.background_tokens
        return self.foreground_tokens / tokens if tokens else 0.0

    @property
    def even(self) -> float:
        """Share of the patches that are foreground: what `share` would be if merging ignored it."""
        return self.foreground_patches / (self.foreground_patches + self.background_patches)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**self._asdict(), "share": self.share, "even": self.even}


def allocate(source: Any, foreground: Any) -> Allocation:
    """Tokens of one image on foreground and background.

    Args:
        source: (p,) index of the token that holds each patch; −1: the patch was dropped.
        foreground: (p,) True where a patch is foreground.
    """
    source, foreground = np.asarray(source), np.asarray(foreground, dtype=bool)
    if source.ndim != 1 or source.shape != foreground.shape or not len(source):
        raise DtemError(f"a map of shape {source.shape} does not fit a foreground of shape {foreground.shape}")
    kept = source >= 0
    _, group, size = np.unique(source, return_inverse=True, return_counts=True)
    part = np.where(kept, 1 / size[group], 0.0)
    return Allocation(
        float(part[foreground].sum()),
        float(part[~foreground].sum()),
        int(foreground.sum()),
        int((~foreground).sum()),
        int((foreground & ~kept).sum()),
        int((~foreground & ~kept).sum()),
    )


def by_mask(mask: Any, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """(p,) True for patches of which at least half is foreground; `mask` is (h, w), from 0 to 1."""
    mask = np.asarray(mask, dtype=np.float64)
    rows, columns = grid
    if mask.ndim != 2 or mask.shape[0] % rows or mask.shape[1] % columns:
        raise DtemError(f"a mask of shape {mask.shape} cannot be cut into {rows} × {columns} equal patches")
    cells = mask.reshape(rows, mask.shape[0] // rows, columns, mask.shape[1] // columns)
    return (cells.mean(axis=(1, 3)) >= 0.5).ravel()


def by_attention(attention: Any) -> NDArray[np.bool_]:
    """(p,) True for patches that get more than an even part of the attention, given as (p,)."""
    attention = np.asarray(attention, dtype=np.float64)
    return attention > attention.mean()
