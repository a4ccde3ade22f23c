"""`dtem.show`: which patches of an image were merged, as a picture for a file, a notebook or the explorer."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from dtem.data import images
from dtem.data.labels import Labels, class_labels, class_name
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.handle import Handle
from dtem.integrations import as_logits_fn
from dtem.tables import Report, Table
from dtem.tasks.running import eval_mode
from dtem.visualise import allocation, groups
from dtem.visualise.class_attention import class_attention
from dtem.visualise.curves import form_of
from dtem.visualise.sheet import sheet

if TYPE_CHECKING:
    from PIL import Image

    from dtem.visualise.segmentation import SegmentationVisualisation

FORMATS = ("png", "svg")
BY_MASK = "the mask"
BY_ATTENTION = "class attention of the unmerged model (mean over heads and blocks), more than even"
Blocks = str | Sequence[int]
"""Blocks from 0: a list, or ``"some"`` (3/4, 1/2, 1/4 and 1/10 of the patches left), ``"all"``, ``"last"``."""


@dataclass(frozen=True)
class MethodView:
    """One method's merging of the image, block by block."""

    r: str
    sources: Int[Tensor, "l p"]
    """Token that holds each patch after each block; −1: dropped."""
    tokens: tuple[int, ...]
    """Tokens after each block, prefix tokens included."""
    probabilities: Float[Tensor, " k"]

    def num_groups(self, block: int) -> int:
        """Groups of patches after a block, without dropped patches."""
        source = self.sources[block]
        return len(torch.unique(source[source >= 0]))


@dataclass(frozen=True, repr=False)
class Visualisation(Report):
    """An image with its groups by method. In a notebook it is displayed as a picture."""

    image: str
    """Name of the file."""
    model: str
    labels: list[str] | None
    """Name of each class; None for a model without a classifier."""
    pixels: UInt8[np.ndarray, "h w c"]
    """The image after preprocessing."""
    grid: tuple[int, int]
    views: dict[str, MethodView]
    unmerged: Float[Tensor, " k"]
    """Probabilities of the classes by the unmerged model."""
    foreground: Bool[np.ndarray, " p"] | None
    """Foreground patches; None where they are not known: no mask, and no class token."""
    foreground_by: str | None
    """How they were determined."""

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return len(next(iter(self.views.values())).sources)

    def allocation(self, name: str, block: int = -1) -> allocation.Allocation | None:
        """Tokens on foreground and background after a block; None where the foreground is not known."""
        if self.foreground is None:
            return None
        return allocation.allocate(self.views[name].sources[block], self.foreground)

    def groups(self, name: str, block: int = -1) -> "Image.Image":
        """Picture of one method's groups after a block (from 0, or from the end as −1)."""
        return groups.draw_groups(self.pixels, self.views[name].sources[block], self.grid)

    def plain(self) -> "Image.Image":
        """The image itself, as large as its groups are drawn."""
        return groups.plain(self.pixels, scale=groups.default_scale(self.pixels.shape[:2], self.grid))

    def blocks(self, which: Blocks = "some") -> list[int]:
        """Indices of the blocks that `which` stands for."""
        first = next(iter(self.views.values()))
        left = [first.num_groups(block) for block in range(self.depth)]
        return groups.choose_blocks(which, self.depth, groups.milestone_blocks(left, self.grid[0] * self.grid[1]))

    def picture(self, blocks: Blocks = "some") -> "Image.Image":
        """One row per method: the image, then its groups after some blocks."""
        chosen = self.blocks(blocks)
        captions = [[self._image_caption(), *(self._caption(n, b) for b in chosen)] for n in self.views]
        return sheet(self._rows(chosen), [f"{name}, r = {view.r}" for name, view in self.views.items()], captions)

    def svg(self, blocks: Blocks = "some") -> str:
        """The same as an SVG document."""
        chosen = self.blocks(blocks)
        names = [f"{name} r={view.r}" for name, view in self.views.items()]
        columns = ["image", *(f"block {block + 1}" for block in chosen)]
        return groups.figure(self._rows(chosen), names, columns, cell=224)

    def _rows(self, blocks: Sequence[int]) -> "list[list[Image.Image]]":
        return [[self.plain(), *(self.groups(name, block) for block in blocks)] for name in self.views]

    def save(self, path: str | Path, blocks: Blocks = "some") -> None:
        """Write the picture; the ending (.png, .svg) names the format."""
        form = form_of(path, FORMATS, "picture")
        write_file(path, self.svg(blocks) if form == "svg" else groups.png(self.picture(blocks)))

    def top_classes(self, probabilities: Float[Tensor, " k"], count: int = 5) -> list[dict[str, Any]]:
        """The likeliest classes; empty for a model without a classifier."""
        if self.labels is None:
            return []
        best = probabilities.topk(min(count, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"class": index, "name": self.labels[index], "probability": value} for index, value in pairs]

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for name, view in self.views.items():
            shares = self.allocation(name)
            rows.append(
                {
                    "method": name,
                    "r": view.r,
                    "tokens": list(view.tokens),
                    "groups": [view.num_groups(block) for block in range(self.depth)],
                    "top5": self.top_classes(view.probabilities),
                    "allocation": None if shares is None else shares.as_dict(),
                }
            )
        return {
            "image": self.image,
            "model": self.model,
            "grid": list(self.grid),
            "foreground_by": self.foreground_by,
            "unmerged": {"top5": self.top_classes(self.unmerged)},
            "rows": rows,
        }

    def parts(self) -> list[Table | str]:
        patches = str(self.grid[0] * self.grid[1])
        rows: list[Sequence[str]] = [("unmerged", "0", patches, "", "", "", self._prediction(self.unmerged))]
        for name, view in self.views.items():
            shares, numbers = self.allocation(name), ["–"] * 3
            if shares is not None:
                tokens = (f"{count:.1f}" for count in (shares.foreground_tokens, shares.background_tokens))
                numbers = [*tokens, f"{100 * shares.share:.0f} %"]
            rows.append((name, view.r, str(view.num_groups(-1)), *numbers, self._prediction(view.probabilities)))
        columns = ("method", "r", "groups at the end", "on foreground", "on background", "foreground share", "predicts")
        caption = None
        if self.foreground is not None:
            caption = (
                f"foreground: {int(self.foreground.sum())} of {len(self.foreground)} patches "
                f"({100 * self.foreground.mean():.0f} %), by {self.foreground_by}"
            )
        return [Table(f"{self.image}, {self.model}", columns, rows, caption)]

    def _prediction(self, probabilities: Tensor) -> str:
        best = self.top_classes(probabilities, 1)
        return f"{best[0]['name']} ({100 * best[0]['probability']:.0f} %)" if best else "–"

    def _repr_png_(self) -> bytes:
        return groups.png(self.picture())

    def _repr_html_(self) -> str:
        return f'<img src="{groups.data_uri(self.picture())}">{super()._repr_html_()}'

    def _image_caption(self) -> str:
        if self.foreground is None:
            return "image"
        return f"image\n{int(self.foreground.sum())} of {len(self.foreground)}\npatches foreground"

    def _caption(self, name: str, block: int) -> str:
        caption = f"block {block + 1}: {self.views[name].num_groups(block)} groups"
        shares = self.allocation(name, block)
        if shares is None:
            return caption
        return f"{caption}\nforeground {shares.foreground_tokens:.1f},\nbackground {shares.background_tokens:.1f}"


def show(
    model: Handle | nn.Module | Mapping[str, Handle], image: Any, *, mask: Any = None, labels: Labels | None = None
) -> "Visualisation | SegmentationVisualisation":
    """Visualise which patches of an image are merged; for a Segmenter with the predicted classes of its pixels.

    Args:
        model: a handle or its patched model; or several handles of the same model, by name, to compare methods.
        image: a file, its content, a PIL image, or an array of bytes (h, w, 3).
        mask: foreground, in any of these forms and of the same size: white (or True) where it is. Without one,
            foreground is what the class token of the unmerged model attends to more than evenly.
        labels: names of the classes: a file with one per line, or a list; None: ImageNet's where they fit. For a
            Segmenter camvid, voc, or a YAML file of classes.

    Examples:
        >>> handle = dtem.patch(model, r=16)
        >>> picture = dtem.show(handle, "cat.jpg")
        >>> picture                        # in a notebook: the picture
        >>> picture.save("groups.png", blocks="all")
        >>> picture.allocation("dtem")     # tokens on foreground and background after the last block
    """
    handles = as_handles(model)
    first = next(iter(handles.values()))
    if first.host.dense:
        return _show_segmentation(handles, image, mask, labels)
    opened = images.open_image(image)
    config = resolve_data_config(first.model)
    x = images.prepare(config, opened)
    grid = _grid(first)
    names = None
    if num_classes := getattr(first.model, "num_classes", 1):
        names = None if labels is None else class_labels(first.model, labels)
        names = names or [class_name(first.model, index) for index in range(num_classes)]
    foreground, by = _foreground(first, x, opened, mask, grid)
    with torch.inference_mode(), eval_mode(first.model), first.at(r=0):
        logits = as_logits_fn(first.model)(_like_weights(first, x))
    return Visualisation(
        image=Path(image).name if isinstance(image, str | os.PathLike) else "image",
        model=first.host.name,
        labels=names,
        pixels=images.pixels(config, x)[0],
        grid=grid,
        views={name: view_image(handle, x) for name, handle in handles.items()},
        unmerged=logits[0].float().softmax(dim=0).cpu(),
        foreground=foreground,
        foreground_by=by,
    )


def _show_segmentation(
    handles: Mapping[str, Handle], image: Any, mask: Any, labels: Labels | None
) -> "SegmentationVisualisation":
    from dtem.visualise import segmentation

    if mask is not None:
        raise DtemError("mask is for classifiers: a Segmenter predicts the class of every pixel itself; leave it out")
    if labels is not None and not isinstance(labels, str | os.PathLike):
        raise DtemError(f"labels = {labels!r} must be camvid, voc, or a YAML file of classes for a Segmenter")
    classes = None if labels is None else segmentation.read_classes(os.fspath(labels))
    return segmentation.show_segmentation(handles, image, classes=classes)


def as_handles(model: Handle | nn.Module | Mapping[str, Handle]) -> dict[str, Handle]:
    """Handles of one model by name; a single one has the name of its method."""
    if isinstance(model, nn.Module):
        model = Handle(model)
    handles = {model.method.name: model} if isinstance(model, Handle) else dict(model)
    if not handles:
        raise DtemError("there is nothing to show: give a handle, or several by name")
    first = next(iter(handles.values()))
    for name, handle in handles.items():
        if handle.host != first.host:
            raise DtemError(f"{name} is of {handle.host.name}, not of {first.host.name}: compare methods on one model")
    return handles


@torch.inference_mode()
def view_image(handle: Handle, x: Float[Tensor, "1 c h w"]) -> MethodView:
    """Run a patched model on a preprocessed image and record what is merged."""
    with eval_mode(handle.model), handle.trace() as trace:
        logits = as_logits_fn(handle.model)(_like_weights(handle, x))
    sources = torch.stack(trace.sources)[:, 0].cpu()
    tokens = tuple(int((size[0] > 0).sum()) for size in trace.sizes)
    return MethodView(str(handle.r), sources, tokens, logits[0].float().softmax(dim=0).cpu())


def _like_weights(handle: Handle, x: Tensor) -> Tensor:
    return x.to(next(handle.model.parameters()))


def _grid(handle: Handle) -> tuple[int, int]:
    """Rows and columns of patches at the size of a preprocessed image."""
    _, height, width = handle.host.image
    patches = handle.host.patches
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise DtemError(f"{handle.host.name}: {patches} patches make no grid for an image of {height}×{width}")
    return rows, patches // rows


def _foreground(
    handle: Handle, x: Tensor, image: "Image.Image", mask: Any, grid: tuple[int, int]
) -> tuple[Bool[np.ndarray, " p"] | None, str | None]:
    if mask is None:
        weights = class_attention(handle, _like_weights(handle, x))
        return (None, None) if weights is None else (allocation.by_attention(weights[0].cpu()), BY_ATTENTION)
    if isinstance(mask, np.ndarray) and mask.dtype == bool:
        mask = mask.astype(np.uint8) * 255
    opened = images.open_image(mask).convert("L").point(lambda value: 255 if value else 0)
    if opened.size != image.size:
        raise DtemError(
            f"the mask has {opened.size[0]} × {opened.size[1]} pixels, the image {image.size[0]} × {image.size[1]}"
        )
    config = resolve_data_config(handle.model)  # cropped as the image is
    cropped = images.pixels(config, images.prepare(config, opened))[0]
    return allocation.by_mask(cropped.mean(axis=2) / 255, grid), BY_MASK
