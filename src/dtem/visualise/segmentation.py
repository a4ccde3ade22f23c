"""Predicted classes of a Segmenter on an image, and the patches that a component of it merged."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn

from dtem.data import images
from dtem.data.preprocessing import pixel_statistics, resolve_data_config
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.handle import Handle
from dtem.tables import Report, Table
from dtem.tasks.running import eval_mode
from dtem.tasks.segmentation import classes as class_lists
from dtem.tasks.segmentation.inference import Inference, predict
from dtem.visualise import groups
from dtem.visualise.curves import form_of
from dtem.visualise.masks import overlay
from dtem.visualise.sheet import sheet
from dtem.visualise.show import Blocks
from dtem.visualise.shown_handles import as_handles

PARTS = ("attention", "mlp")
UNMERGED = "unmerged"


@dataclass(frozen=True)
class SegmentationView:
    """One method's prediction, and its groups in each component: attention and MLP of each block in turn."""

    r: str
    predicted: Int[np.ndarray, "h w"]
    sources: list[Int[Tensor, " p"]]


@dataclass(frozen=True, repr=False)
class SegmentationVisualisation(Report):
    """An image with the classes of its pixels and the merged groups, by method."""

    image: str
    model: str
    classes: class_lists.Classes
    pixels: UInt8[np.ndarray, "h w 3"]
    patch: tuple[int, int]
    unmerged: Int[np.ndarray, "h w"]
    """Class of each pixel by the unmerged model."""
    views: dict[str, SegmentationView]
    blocks: list[int]
    """Blocks that are drawn, from 0."""
    part: str
    """Component of the block: attention or mlp."""
    adapters: tuple[str, ...] = ()
    """Files of the trained adapters."""
    notes: tuple[str, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches; the last ones are padded."""
        (height, width), (rows, columns) = self.pixels.shape[:2], self.patch
        return -(-height // rows), -(-width // columns)

    def class_shares(self) -> dict[str, float]:
        """Percent of the pixels of each class by the unmerged model, the largest first."""
        share = 100 * np.bincount(self.unmerged.ravel(), minlength=len(self.classes)) / self.unmerged.size
        return {self.classes.names[index]: float(share[index]) for index in np.argsort(-share) if share[index] > 0}

    def agreement(self, name: str) -> float:
        """Percent of the pixels to which a method gives the class of the unmerged model."""
        return 100 * float((self.views[name].predicted == self.unmerged).mean())

    def num_groups(self, name: str) -> list[int]:
        """Groups in each block that is drawn."""
        return [len(torch.unique(source)) for source in self._sources(name)]

    def picture(self) -> Image.Image:
        """The image and its classes by the unmerged model; for each method the image, the predicted classes, and the
        groups of some blocks; the names of the classes below.
        """
        colours, image = self.classes.drawn, Image.fromarray(self.pixels)
        rows = [[image, overlay(self.pixels, self.unmerged, colours)]]
        captions = [["image", "predicted classes"]]
        for name, view in self.views.items():
            drawn = [self._draw(source) for source in self._sources(name)]
            rows.append([image, overlay(self.pixels, view.predicted, colours), *drawn])
            counts = zip(self.blocks, self.num_groups(name), strict=True)
            texts = [f"block {block + 1}, {self.part}: {count} groups" for block, count in counts]
            captions.append(["image", f"{self.agreement(name):.1f} % of pixels as unmerged", *texts])
        headings = [UNMERGED, *(f"{name}, r = {view.r}" for name, view in self.views.items())]
        return sheet(rows, headings, captions, self.legend())

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Names and colours, as they are drawn over the image, of the classes that some variant predicts: those of the
        unmerged model first, the largest first.
        """
        shares, colours = self.class_shares(), dict(zip(self.classes.names, self.classes.drawn, strict=True))
        others = {int(index) for view in self.views.values() for index in np.unique(view.predicted)}
        found = dict.fromkeys([*shares, *(self.classes.names[index] for index in sorted(others))])
        return [(f"{name} {shares[name]:.0f} %" if name in shares else name, colours[name]) for name in found]

    def save(self, path: str | Path) -> None:
        """Write the picture as a PNG file."""
        form_of(path, ("png",), "picture")
        write_file(path, groups.png(self.picture()))

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"method": name, "r": view.r, "agreement": self.agreement(name), "groups": self.num_groups(name)}
            for name, view in self.views.items()
        ]
        return {
            "image": self.image,
            "model": self.model,
            "adapters": list(self.adapters),
            "grid": list(self.grid),
            "classes": self.class_shares(),
            "blocks": [block + 1 for block in self.blocks],
            "part": self.part,
            "rows": rows,
        }

    def parts(self) -> list[Table | str]:
        columns = ("method", "r", "pixels as unmerged %", f"groups of {self.grid[0] * self.grid[1]}, by block")
        rows = [(n, view.r, f"{self.agreement(n):.1f}", str(self.num_groups(n))) for n, view in self.views.items()]
        shares = ", ".join(f"{name} {share:.0f} %" for name, share in self.class_shares().items())
        table = Table(f"{self.image}, {self.model}", columns, rows)
        return [table, f"Predicted by the unmerged model: {shares}", *self.notes]

    def _repr_html_(self) -> str:
        return f'<img src="{groups.data_uri(self.picture())}">{super()._repr_html_()}'

    def _sources(self, name: str) -> list[Tensor]:
        return [self.views[name].sources[2 * block + PARTS.index(self.part)] for block in self.blocks]

    def _draw(self, source: Tensor) -> Image.Image:
        """Groups of whole patches, cropped to the image."""
        height, width = self.pixels.shape[:2]
        high, wide = (count * side for count, side in zip(self.grid, self.patch, strict=True))
        padded = np.pad(self.pixels, [(0, high - height), (0, wide - width), (0, 0)])
        return groups.draw_groups(padded, source, self.grid).resize((wide, high)).crop((0, 0, width, height))


def show_segmentation(
    model: Handle | nn.Module | Mapping[str, Handle],
    image: Any,
    *,
    classes: class_lists.Classes | None = None,
    blocks: Blocks = "some",
    part: str = "attention",
    short_side: int = 0,
    **fields: Any,
) -> SegmentationVisualisation:
    """Visualise the predicted classes of an image and the patches that were merged for them.

    Args:
        model: a handle of a patched Segmenter or its model; or several handles of the same one, by name.
        image: a file, its content, a PIL image, or an array of bytes (h, w, 3).
        classes: names and colours of the classes; None: their numbers.
        blocks: blocks whose groups are drawn: a list (from 0), ``"some"`` (first, middle, last), ``"all"``, ``"last"``.
        part: the component of the block: ``attention`` or ``mlp``.
        short_side: resize the short side of the image to this first; 0: keep its size.
        fields: others of the result: ``adapters``, ``notes``, and ``name``, that of the image.

    Examples:
        >>> handle = dtem.patch(dtem.create_model("seg_t_mask_16", weights="seg.safetensors"), r="40%")
        >>> show_segmentation(handle, "street.jpg").save("street.png")
    """
    handles = as_handles(model)
    first = next(iter(handles.values()))
    if not first.host.dense:
        raise DtemError(f"{first.host.name} is not a segmentation model: use dtem.show")
    if part not in PARTS:
        raise DtemError(f"part = {part!r} is not known; choose {' or '.join(PARTS)}")
    segmenter: Any = first.model
    if classes is None:
        classes = numbered_classes(segmenter.num_classes)
    if len(classes) != segmenter.num_classes:
        raise DtemError(f"there are {len(classes)} classes, and the model has {segmenter.num_classes}")
    opened = images.open_image(image).convert("RGB")
    size = Inference(short_side).resized((opened.height, opened.width))
    pixels = np.asarray(opened.resize(size[::-1]))
    config = resolve_data_config(segmenter)
    mean, std = pixel_statistics(config)
    x = ((torch.from_numpy(pixels.copy()).movedim(-1, 0) / 255 - mean) / std)[None].to(next(segmenter.parameters()))
    depth = len(segmenter.encoder.blocks)
    with eval_mode(segmenter), first.at(r=0):
        unmerged = predict(segmenter, x)[0].cpu().numpy()
    return SegmentationVisualisation(
        image=fields.pop("name", "image"),
        model=first.host.name,
        classes=classes,
        pixels=pixels,
        patch=segmenter.patch,
        unmerged=unmerged,
        views={name: _view(handle, x) for name, handle in handles.items()},
        blocks=groups.choose_blocks(blocks, depth, sorted({0, (depth - 1) // 2, depth - 1})),
        part=part,
        **fields,
    )


def _view(handle: Handle, x: Float[Tensor, "1 c h w"]) -> SegmentationView:
    with eval_mode(handle.model), handle.trace() as trace:
        predicted = predict(handle.model, x)[0].cpu().numpy()
    sources = [source[0].cpu() for source in trace.sources]
    if not handle.method.resets_each_block:  # one for each block, between its attention and its MLP
        every = torch.arange(len(sources[0])) + handle.host.prefix
        sources = [each for pair in itertools.pairwise([every, *sources]) for each in pair]
    return SegmentationView(str(handle.r), predicted, sources)


def numbered_classes(count: int) -> class_lists.Classes:
    """Classes without names."""
    return class_lists.Classes(tuple(f"class {index}" for index in range(count)), tuple(range(count)))
