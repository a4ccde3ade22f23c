"""`dtem.show`: which patches of an image were merged, as a picture for a file, a notebook or the explorer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from dtem.files import write_file
from dtem.handle import Handle
from dtem.tasks.classification import pictures
from dtem.tasks.classification.evaluate import at_rates, evaluating
from dtem.types import DtemError
from dtem.visualise import allocation, attention, groups
from dtem.visualise.sheet import sheet

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("png", "svg")
BY_MASK = "the mask"
BY_ATTENTION = "class attention of the unmerged model (mean over heads and blocks), more than even"


@dataclass(frozen=True)
class View:
    """What one method made of the image."""

    r: str
    sources: Int[Tensor, "l p"]
    """After each block, the token that holds each patch; −1: dropped."""
    tokens: tuple[int, ...]
    """Tokens after each block, prefix tokens among them."""
    probabilities: Float[Tensor, " k"]

    def groups(self, block: int) -> int:
        """Groups of patches after a block, dropped ones left out."""
        source = self.sources[block]
        return len(torch.unique(source[source >= 0]))


@dataclass(frozen=True)
class Shown:
    """An image with its groups by method. In a notebook it is shown as a picture."""

    pixels: UInt8[np.ndarray, "h w c"]
    """The image as the model gets it."""
    grid: tuple[int, int]
    views: dict[str, View]
    unmerged: Float[Tensor, " k"]
    """Probabilities that the unmerged model gives to the classes."""
    foreground: Bool[np.ndarray, " p"] | None
    """Patches that count as foreground; None where nothing says so: no mask, and no class token."""
    foreground_by: str | None
    """What says so."""

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return len(next(iter(self.views.values())).sources)

    def allocation(self, name: str, block: int = -1) -> allocation.Allocation | None:
        """Tokens on foreground and background after a block; None where no foreground is known."""
        return (
            None if self.foreground is None else allocation.allocate(self.views[name].sources[block], self.foreground)
        )

    def groups(self, name: str, block: int = -1) -> "Image.Image":
        """The groups of one method after a block (from 0, or from the end as −1)."""
        return groups.draw_groups(self.pixels, self.views[name].sources[block], self.grid)

    def plain(self) -> "Image.Image":
        """The image itself, as large as its groups are drawn."""
        return groups.plain(self.pixels, scale=groups.default_scale(self.pixels.shape[:2], self.grid))

    def blocks(self, which: str | Sequence[int] = "some") -> list[int]:
        """Blocks, from 0: ``"some"`` (3/4, 1/2, 1/4 and 1/10 of the patches left), ``"all"``, ``"last"``, or a list."""
        if not isinstance(which, str):
            wrong = [block for block in which if not -self.depth <= block < self.depth]
            if wrong or not which:
                raise DtemError(f"blocks = {list(which)}: the model has blocks 0 to {self.depth - 1}")
            return [block % self.depth for block in which]
        first = next(iter(self.views.values()))
        named = {"all": list(range(self.depth)), "last": [self.depth - 1]}
        if which == "some":
            left = [first.groups(block) for block in range(self.depth)]
            return groups.telling_blocks(left, self.grid[0] * self.grid[1])
        if which not in named:
            raise DtemError(f"blocks = {which!r} is not known; choose 'some', 'all', 'last', or give a list of numbers")
        return named[which]

    def picture(self, blocks: str | Sequence[int] = "some") -> "Image.Image":
        """All methods in one picture: a row each, the image first, then its groups after some blocks."""
        chosen = self.blocks(blocks)
        rows = [[self.plain(), *(self.groups(name, block) for block in chosen)] for name in self.views]
        captions = [[self._image_caption(), *(self._caption(n, b) for b in chosen)] for n in self.views]
        return sheet(rows, [f"{name}, r = {view.r}" for name, view in self.views.items()], captions)

    def svg(self, blocks: str | Sequence[int] = "some") -> str:
        """The same as an SVG document."""
        chosen = self.blocks(blocks)
        rows = [[self.plain(), *(self.groups(name, block) for block in chosen)] for name in self.views]
        captions = [f"block {block + 1}" for block in chosen]
        return groups.figure(
            rows, [f"{n} r={view.r}" for n, view in self.views.items()], ["image", *captions], cell=224
        )

    def save(self, path: str | Path, blocks: str | Sequence[int] = "some") -> None:
        """Into a file; its ending (.png, .svg) names the format."""
        content = self.svg(blocks) if form_of(path) == "svg" else groups.png(self.picture(blocks))
        write_file(path, content)

    def _repr_png_(self) -> bytes:
        return groups.png(self.picture())

    def _image_caption(self) -> str:
        if self.foreground is None:
            return "image"
        return f"image\n{int(self.foreground.sum())} of {len(self.foreground)}\npatches foreground"

    def _caption(self, name: str, block: int) -> str:
        left = f"block {block + 1}: {self.views[name].groups(block)} groups"
        found = self.allocation(name, block)
        if found is None:
            return left
        return f"{left}\nforeground {found.foreground_tokens:.1f},\nbackground {found.background_tokens:.1f}"


def form_of(path: str | Path) -> str:
    """The format that a file's ending names."""
    form = Path(path).suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise DtemError(
            f"{path} does not name a kind of picture; end it in {' or '.join('.' + name for name in FORMATS)}"
        )
    return form


def show(handles: Handle | Mapping[str, Handle], image: Any, *, mask: Any = None) -> Shown:
    """See which patches merging joins.

    Args:
        handles: of a patched model; or several of the same model, by name, to be compared.
        image: a file, its content, a PIL image, or an array of bytes (h, w, 3).
        mask: foreground, in any of these forms and of the same size: white (or True) where it is. Without one,
            foreground is what the class token of the unmerged model attends to more than evenly.

    Example:
        >>> tome, ours = dtem.patch(model, "tome", r=16), dtem.from_pretrained("my.safetensors", copy, r=16)
        >>> shown = dtem.show({"tome": tome, "dtem": ours}, "cat.jpg")
        >>> shown                        # in a notebook: the picture
        >>> shown.save("groups.png", blocks="all")
        >>> shown.allocation("dtem")     # tokens on foreground and background after the last block
    """
    if isinstance(handles, Handle):
        handles = {handles.method.name: handles}
    if not handles:
        raise DtemError("there is nothing to show: give a handle, or several by name")
    first = next(iter(handles.values()))
    _check(handles, first)
    opened = pictures.open_image(image)
    config = pictures.data_config(first.model, first.host.image)
    x = pictures.prepare(config, opened)
    rows, columns = _grid(first)
    probabilities = unmerged(first, x)
    foreground, by = _foreground(first, x, opened, mask, (rows, columns))
    views = {name: view(handle, x) for name, handle in handles.items()}
    return Shown(pictures.pixels(config, x)[0], (rows, columns), views, probabilities, foreground, by)


@torch.inference_mode()
def view(handle: Handle, x: Float[Tensor, "1 c h w"]) -> View:
    """Run one patched model on a prepared image, and note what was merged."""
    with evaluating(handle.model), handle.trace() as trace:
        logits = handle.model(x.to(_like(handle)))
    sources = torch.stack(trace.sources)[:, 0].cpu()
    tokens = tuple(int((size[0] > 0).sum()) for size in trace.sizes)
    return View(str(handle.r), sources, tokens, logits[0].float().softmax(dim=0).cpu())


@torch.inference_mode()
def unmerged(handle: Handle, x: Float[Tensor, "1 c h w"]) -> Float[Tensor, " k"]:
    """Probabilities of the classes without merging."""
    with evaluating(handle.model):
        return at_rates(handle, [0])["0"](x.to(_like(handle)))[0].float().softmax(dim=0).cpu()


def _like(handle: Handle) -> Tensor:
    return next(handle.model.parameters())


def _grid(handle: Handle) -> tuple[int, int]:
    """Patches from top to bottom and from left to right, at the size that the image is prepared at."""
    _, height, width = handle.host.image
    patches = handle.host.patches
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise DtemError(f"{handle.host.name}: {patches} patches make no grid for an image of {height}×{width}")
    return rows, patches // rows


def _check(handles: Mapping[str, Handle], first: Handle) -> None:
    if first.host.dense:
        raise DtemError(f"{first.host.name} is for dense prediction: `dtem show --task segmentation` shows that")
    for name, handle in handles.items():
        if handle.host != first.host:
            raise DtemError(f"{name} is of {handle.host.name}, not of {first.host.name}: compare methods on one model")


def _foreground(
    handle: Handle, x: Tensor, image: "Image.Image", mask: Any, grid: tuple[int, int]
) -> tuple[Bool[np.ndarray, " p"] | None, str | None]:
    if mask is None:
        seen = attention.class_attention(handle, x.to(_like(handle)))
        return (None, None) if seen is None else (allocation.by_attention(seen[0].cpu()), BY_ATTENTION)
    if isinstance(mask, np.ndarray) and mask.dtype == bool:
        mask = mask.astype(np.uint8) * 255
    opened = pictures.open_image(mask).convert("L").point(lambda value: 255 if value else 0)
    if opened.size != image.size:
        raise DtemError(
            f"the mask has {opened.size[0]} × {opened.size[1]} pixels, the image {image.size[0]} × {image.size[1]}"
        )
    # Cropped as the image is: through the same steps.
    config = pictures.data_config(handle.model, handle.host.image)
    cropped = pictures.pixels(config, pictures.prepare(config, opened))[0]
    return allocation.by_mask(cropped.mean(axis=2) / 255, grid), BY_MASK
