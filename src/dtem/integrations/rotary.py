"""Rotary position embeddings (RoPE) of merged tokens, for all hosts whose angles are linear in row and column.

While tokens are merged, each has its row and column, in patches, as two more channels after its features. So positions
are averaged by size, soft or hard, as features are, and every block rotates a token by the angles of its mean position.
In units of patches they are exact in half precision too (up to 256 rows). Prefix tokens are not rotated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

CHANNELS = 2
"""Channels after the features: row and column."""


@dataclass(frozen=True)
class Rotary:
    """The angles of one block, θ(row, column) = start + row · by_row + column · by_column, per pair of channels."""

    start: Float[Tensor, "h e"]
    """h = 1 where all heads have the same."""
    by_row: Float[Tensor, "h e"]
    by_column: Float[Tensor, "h e"]
    half: bool
    """Whether channel i is paired with i + e, or 2i with 2i + 1."""

    @classmethod
    def axial(
        cls, frequencies: Tensor, starts: Sequence[float] | Tensor, steps: Sequence[float] | Tensor, half: bool,
        column_first: bool = False,
    ) -> "Rotary":  # fmt: skip
        """Half of the pairs for the row, the others for the column.

        Args:
            frequencies: of each half, (e / 2,).
            starts: coordinate of the first row and of the first column.
            steps: difference between the coordinates of neighbouring rows, and of columns.
            half: as the field.
            column_first: the first half is for the column.
        """
        none = torch.zeros_like(frequencies)
        row, column = (steps[0] * frequencies, none), (none, steps[1] * frequencies)
        start = (starts[0] * frequencies, starts[1] * frequencies)
        if column_first:
            row, column, start = row[::-1], column[::-1], start[::-1]
        return cls(torch.cat(start)[None], torch.cat(row)[None], torch.cat(column)[None], half)

    def rotate(
        self, q: Float[Tensor, "b h n e"], k: Float[Tensor, "b k n e"], position: Float[Tensor, "b n 2"], prefix: int
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k n e"]]:
        """Queries and keys, rotated; the first `prefix` stay."""
        place = position[:, None, prefix:].float()
        angle = self.start[:, None] + place[..., :1] * self.by_row[:, None] + place[..., 1:] * self.by_column[:, None]
        sin, cos = pad(angle.sin(), (0, 0, prefix, 0)), pad(angle.cos(), (0, 0, prefix, 0), value=1.0)
        return _turn(q, sin, cos, self.half), _turn(k, sin, cos, self.half)


def _turn(x: Float[Tensor, "b h n e"], sin: Tensor, cos: Tensor, half: bool) -> Float[Tensor, "b h n e"]:
    if half:
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x[..., ::2], x[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    return (torch.cat(turned, dim=-1) if half else torch.stack(turned, dim=-1).flatten(3)).to(x.dtype)


def with_positions(x: Float[Tensor, "b n c"], grid: Sequence[int], prefix: int) -> Float[Tensor, "b n d"]:
    """Tokens with their row and column as further channels; those of the prefix mean nothing."""
    rows, columns = (torch.arange(side, device=x.device, dtype=x.dtype) for side in grid)
    position = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).view(-1, CHANNELS)
    return torch.cat([x, pad(position, (0, 0, prefix, 0)).expand(x.shape[0], -1, -1)], dim=2)
