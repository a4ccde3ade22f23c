"""`dtem.show`: which patches of an image were merged, as a picture for a file, a notebook or the explorer."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from dtem import integrations
from dtem.data import images
from dtem.data.labels import Labels, class_labels, class_name, num_classes
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError
from dtem.evaluation.variants import Adapters
from dtem.files import write_file
from dtem.handle import Handle
from dtem.tables import Report, Table
from dtem.tasks.running import eval_mode
from dtem.tasks.segmentation.classes import named_classes
from dtem.visualise import allocation, groups
from dtem.visualise.class_attention import class_attention
from dtem.visualise.curves import form_of
from dtem.visualise.sheet import sheet
from dtem.visualise.shown_handles import DEFAULT_METHODS, find_handles

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
    drawn: Blocks = "some"
    """Blocks that are drawn unless others are asked for."""
    adapters: tuple[str, ...] = ()
    """Files of the trained adapters."""
    notes: tuple[str, ...] = ()

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

    def blocks(self, which: Blocks | None = None) -> list[int]:
        """Indices of the blocks that `which` (None: `drawn`) stands for."""
        first = next(iter(self.views.values()))
        left = [first.num_groups(block) for block in range(self.depth)]
        which = self.drawn if which is None else which
        return groups.choose_blocks(which, self.depth, groups.milestone_blocks(left, self.grid[0] * self.grid[1]))

    def picture(self, blocks: Blocks | None = None) -> "Image.Image":
        """One row per method: the image, then its groups after some blocks."""
        chosen = self.blocks(blocks)
        captions = [[self._image_caption(), *(self._caption(n, b) for b in chosen)] for n in self.views]
        return sheet(self._rows(chosen), [f"{name}, r = {view.r}" for name, view in self.views.items()], captions)

    def svg(self, blocks: Blocks | None = None) -> str:
        """The same as an SVG document."""
        chosen = self.blocks(blocks)
        names = [f"{name} r={view.r}" for name, view in self.views.items()]
        columns = ["image", *(f"block {block + 1}" for block in chosen)]
        return groups.figure(self._rows(chosen), names, columns, cell=224)

    def _rows(self, blocks: Sequence[int]) -> "list[list[Image.Image]]":
        return [[self.plain(), *(self.groups(name, block) for block in blocks)] for name in self.views]

    def save(self, path: str | Path, blocks: Blocks | None = None) -> None:
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
            "adapters": list(self.adapters),
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
        return [Table(f"{self.image}, {self.model}", columns, rows, caption), *self.notes]

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
    model: str | nn.Module | Handle | Mapping[str, Handle],
    image: Any,
    *,
    methods: str | Sequence[str] = DEFAULT_METHODS,
    adapters: Adapters = (),
    r: object = None,
    mask: Any = None,
    labels: Labels | None = None,
    blocks: Blocks = "some",
    part: str = "attention",
    short_side: int = 0,
    shortcut: bool = False,
    **model_options: Any,
) -> "Visualisation | SegmentationVisualisation":
    """Visualise which patches of an image are merged; for a Segmenter with the predicted classes of its pixels.

    Args:
        model: a model's name (for `create_model`) or a model: copies that share its weights are patched with each of
            `methods`. Or a handle, a patched model, or several handles of one model by name: they are shown as they
            are.
        image: a file, its content, a PIL image, or an array of bytes (h, w, 3).
        methods: names of methods to compare.
        adapters: trained adapters: files, Hub ids or shipped names, as ``LABEL=FILE`` where there are several, or a
            mapping from label to file. An adapter takes the place of its untrained method. Without any, and with
            a model's name, `dtem` takes the one that comes with the package for it.
        r: tokens merged per block (see `dtem.schedule`); default 16, for handles their present one.
        mask: foreground, in any of the forms of `image` and of the same size: white (or True) where it is. Without one,
            foreground is what the class token of the unmerged model attends to more than evenly.
        labels: names of the classes: a file with one per line, or a list; None: ImageNet's where they fit. For a
            Segmenter camvid, voc, or a YAML file of classes.
        blocks: blocks to draw: a list (from 0), ``"some"``, ``"all"`` or ``"last"``.
        part: Segmenter: the component of a block to draw, ``attention`` or ``mlp``.
        short_side: Segmenter: resize the short side of the image to this first; 0: keep its size.
        shortcut: in the last block of a class-token model, compute the class token only.
        model_options: what `create_model` takes (``weights``, ``img_size``, …), where `model` is a name.

    Examples:
        >>> picture = dtem.show("deit_tiny_patch16_224", "cat.jpg", methods="tome,evit", r=16)
        >>> picture                        # in a notebook: the picture
        >>> picture.save("groups.png", blocks="all")
        >>> picture.allocation("tome")     # tokens on foreground and background after the last block
    """
    opened = images.open_image(image)  # a file that cannot be read is refused before weights are downloaded
    name = Path(image).name if isinstance(image, str | os.PathLike) else "image"
    handles, files, notes = find_handles(model, labels, methods, adapters, r, shortcut, model_options)
    dense = next(iter(handles.values())).host.dense
    with contextlib.ExitStack() as stack:
        if r is not None:
            for handle in handles.values():
                stack.enter_context(handle.at(r=r))
        if dense:
            if (host := next(iter(handles.values())).host).family != "segmenter":
                raise DtemError(f"{host.name} merges in every component and has no masks to show; choose another model")
            if mask is not None:
                raise DtemError("mask is for classifiers: a Segmenter predicts the class of every pixel; leave it out")
            from dtem.visualise import segmentation

            return segmentation.show_segmentation(
                handles,
                opened,
                classes=named_classes(labels),
                blocks=blocks,
                part=part,
                short_side=short_side,
                name=name,
                adapters=files,
                notes=notes,
            )
        for option, value, default in (("part", part, "attention"), ("short_side", short_side, 0)):
            if value != default:
                raise DtemError(f"{option} = {value!r} is for a Segmenter, and the model is not one; leave it out")
        return _show_classifier(handles, opened, mask, labels, image=name, drawn=blocks, adapters=files, notes=notes)


def _show_classifier(
    handles: Mapping[str, Handle], opened: "Image.Image", mask: Any, labels: Labels | None, **fields: Any
) -> Visualisation:
    first = next(iter(handles.values()))
    config = resolve_data_config(first.model)
    x = images.prepare(config, opened)
    grid = _grid(first)
    names = None
    if (count := num_classes(first.model)) != 0:
        names = None if labels is None else class_labels(first.model, labels)
        names = names or [class_name(first.model, index) for index in range(count or 1)]
    foreground, by = _foreground(first, x, opened, mask, grid)
    with torch.inference_mode(), eval_mode(first.model), first.at(r=0):
        logits = integrations.as_logits_fn(first.model)(_like_weights(first, x))
    picture = Visualisation(
        model=first.host.name,
        labels=names,
        pixels=images.pixels(config, x)[0],
        grid=grid,
        views={name: view_image(handle, x) for name, handle in handles.items()},
        unmerged=logits[0].float().softmax(dim=0).cpu(),
        foreground=foreground,
        foreground_by=by,
        **fields,
    )
    picture.blocks()  # refused now, not when it is drawn
    return picture


@torch.inference_mode()
def view_image(handle: Handle, x: Float[Tensor, "1 c h w"]) -> MethodView:
    """Run a patched model on a preprocessed image and record what is merged."""
    with eval_mode(handle.model), handle.trace() as trace:
        logits = integrations.as_logits_fn(handle.model)(_like_weights(handle, x))
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
