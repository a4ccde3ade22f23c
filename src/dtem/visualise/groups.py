"""Pictures of merged patches: those that share a token have their mean colour, with a line around them. Dropped patches
are dimmed and hatched.

``trace.sources[block][image]`` of `handle.trace()` has the token that holds each patch, −1 if it was dropped.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dtem.errors import DtemError

_PATCH = 12
"""Least pixels of a patch in a picture: room for the lines."""
LINE = (230, 60, 40)
SHARES = (0.75, 0.5, 0.25, 0.1)
"""Shares of patches left at which `milestone_blocks` takes a block."""
DIM, HATCH, STRIDE = 0.3, (150, 150, 150), 6
"""Dropped patches: factor of their brightness, and colour and distance (pixels) of diagonal lines."""


class _Groups(NamedTuple):
    label: NDArray[np.intp]
    """(gh, gw): group of each patch, from 0. Dropped patches come first, each a group of its own."""
    colour: NDArray[np.uint8]
    """(groups, 3): mean colour of each group, dimmed where it was dropped."""
    dropped: int
    """How many of the groups are dropped patches."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels of the image."""

    def outline(self) -> NDArray[np.intp]:
        """(gh, gw): labels that differ where a border runs; between dropped patches there is none."""
        return np.maximum(self.label, self.dropped - 1)


def draw_groups(
    image: Any,
    source: Any,
    grid: tuple[int, int],
    *,
    scale: int | None = None,
) -> Image.Image:
    """Paint each group of patches in its mean colour and draw its border, one pixel on either side of where groups
    meet. Dropped patches are dimmed and hatched.

    Args:
        image: PIL image, or array (h, w), (h, w, 1) or (h, w, 3): bytes, or floats from 0 to 1.
        source: (p,) index of the token that holds each patch, row by row; −1: the patch was dropped.
        grid: patches from top to bottom, and from left to right.
        scale: pixels of the picture per pixel of the image; None: as many as the lines need.
    """
    groups = _groups(image, source, grid)
    high, wide = groups.patch
    scale = scale or _scale(groups.patch)
    label, outline = (
        part.repeat(high * scale, axis=0).repeat(wide * scale, axis=1) for part in (groups.label, groups.outline())
    )
    picture = groups.colour[label]
    picture[(label < groups.dropped) & (np.add(*np.indices(label.shape)) % STRIDE == 0)] = HATCH
    picture[_borders(outline)] = LINE
    return Image.fromarray(picture)


def plain(image: Any, *, scale: int = 1) -> Image.Image:
    """The image itself at the scale of its pictures, pixels kept square."""
    return Image.fromarray(_rgb(image).repeat(scale, axis=0).repeat(scale, axis=1))


def default_scale(size: tuple[int, int], grid: tuple[int, int]) -> int:
    """What `draw_groups` takes for an image of that height and width."""
    return _scale((size[0] // grid[0], size[1] // grid[1]))


def figure(
    pictures: Sequence[Sequence[Image.Image]], rows: Sequence[str], columns: Sequence[str], *, cell: int = 168
) -> str:
    """Pictures in rows and columns with their captions, as one SVG document that needs no other file.

    Args:
        pictures: row by row; all rows are equally long.
        rows: caption to the left of each row.
        columns: caption above each column.
        cell: width of a picture in the figure.
    """
    if len(pictures) != len(rows) or any(len(row) != len(columns) for row in pictures):
        lengths = [len(row) for row in pictures]
        raise DtemError(f"{len(rows)} × {len(columns)} captions do not fit pictures in rows of {lengths}")
    gap, left, top = 10, 8 * max(map(len, rows), default=0) + 10, 22
    high = max((cell * picture.height // picture.width for row in pictures for picture in row), default=cell)
    width, height = left + len(columns) * (cell + gap), top + len(rows) * (high + gap)
    parts = [f'<text x="{left + x * (cell + gap)}" y="14">{escape(text)}</text>' for x, text in enumerate(columns)]
    for y, (caption, row) in enumerate(zip(rows, pictures, strict=True)):
        over = top + y * (high + gap)
        parts.append(f'<text x="0" y="{over + high // 2 + 4}">{escape(caption)}</text>')
        for x, picture in enumerate(row):
            parts.append(
                f'<image x="{left + x * (cell + gap)}" y="{over}" width="{cell}" height="{high}" '
                f'href="{data_uri(picture)}"><title>{escape(caption)}, {escape(columns[x])}</title></image>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="currentColor" role="img">{"".join(parts)}</svg>'
    )


def png(picture: Image.Image) -> bytes:
    """The content of a PNG file."""
    content = io.BytesIO()
    picture.save(content, format="PNG", optimize=True)
    return content.getvalue()


def data_uri(picture: Image.Image) -> str:
    """The picture as a PNG inside a link."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def milestone_blocks(left: Sequence[int], patches: int) -> list[int]:
    """The blocks after which three quarters, half, a quarter and a tenth of the patches are left; at least the last.

    Args:
        left: groups after each block.
        patches: of the image.
    """
    reached = (next((block for block, count in enumerate(left) if count <= share * patches), None) for share in SHARES)
    return list(dict.fromkeys(block for block in reached if block is not None)) or [len(left) - 1]


def choose_blocks(which: str | Sequence[int], depth: int, some: Sequence[int]) -> list[int]:
    """Blocks from 0: `some`, all, the last, or a list (−1 is the last)."""
    if isinstance(which, str):
        named = {"some": list(some), "all": list(range(depth)), "last": [depth - 1]}
        if which not in named:
            raise DtemError(f"blocks = {which!r} is not known; choose 'some', 'all', 'last', or a list of numbers")
        return named[which]
    outside = [block for block in which if not -depth <= block < depth]
    if outside:
        raise DtemError(f"there is no block {outside[0] + 1} (the first is 1): the model has {depth} blocks")
    if not which:
        raise DtemError("blocks is empty; choose 'some', 'all', 'last', or a list of numbers")
    return [block % depth for block in which]


def _groups(image: Any, source: Any, grid: tuple[int, int]) -> _Groups:
    pixels = _rgb(image)
    source = np.asarray(source)
    rows, columns = grid
    height, width = pixels.shape[:2]
    if source.shape != (rows * columns,):
        raise DtemError(f"a map of shape {source.shape} does not fit a grid of {rows} × {columns} patches")
    if height % rows or width % columns:
        raise DtemError(f"an image of {height} × {width} pixels cannot be cut into {rows} × {columns} equal patches")
    high, wide = height // rows, width // columns
    is_dropped = source < 0
    _, label = np.unique(np.where(is_dropped, -1 - np.arange(len(source)), source), return_inverse=True)
    cells = pixels.reshape(rows, high, columns, wide, 3).sum(axis=(1, 3), dtype=np.int64).reshape(-1, 3)
    total = np.zeros((label.max() + 1, 3), dtype=np.int64)
    np.add.at(total, label, cells)
    mean = total / (np.bincount(label) * high * wide)[:, None]
    dropped = int(is_dropped.sum())
    mean[:dropped] *= DIM
    return _Groups(label.reshape(grid), np.rint(mean).astype(np.uint8), dropped, (high, wide))


def _rgb(image: Any) -> NDArray[np.uint8]:
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise DtemError(f"an image of shape {pixels.shape} is neither (h, w), (h, w, 1) nor (h, w, 3)")
    if pixels.dtype != np.uint8:
        if not np.issubdtype(pixels.dtype, np.floating):
            raise DtemError(f"image values are {pixels.dtype}; give bytes, or floats from 0 to 1")
        pixels = np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def _borders(label: NDArray[np.intp]) -> NDArray[np.bool_]:
    """True for every pixel with a pixel of another group above, below, to the left or to the right."""
    border = np.zeros(label.shape, dtype=bool)
    down, across = label[1:] != label[:-1], label[:, 1:] != label[:, :-1]
    border[1:] |= down
    border[:-1] |= down
    border[:, 1:] |= across
    border[:, :-1] |= across
    return border


def _scale(patch: tuple[int, int]) -> int:
    return max(1, -(-_PATCH // min(patch)))
