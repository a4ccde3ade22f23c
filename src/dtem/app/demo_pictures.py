"""What the demo shows of single images: predictions and groups by method, and how many tokens stay on the object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from dtem.data import images as image_data
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import Source
from dtem.data.transforms import eval_transform
from dtem.handle import Handle
from dtem.tasks.classification.outcomes import Outcomes
from dtem.tasks.running import eval_mode, sample
from dtem.visualise import allocation
from dtem.visualise.class_attention import class_attention
from dtem.visualise.show import BY_ATTENTION, BY_MASK, Visualisation, show

NUM_PICTURES = 6
FOCUS_IMAGES = 100
Masks = Callable[[str], Bool[ndarray, "h w"]]
"""Where the object of an image is, by the image's name."""


@dataclass(frozen=True)
class DemoPicture:
    """One held-out image: groups, predictions and probabilities by method."""

    shown: Visualisation
    """Has `pixels`, `unmerged` (probabilities), `views` by method (`sources`, `probabilities`), `allocation(method,
    block)`; `labels` are the names of all classes."""
    label: int
    """Its class; by the unmerged model where the images have no labels."""
    reason: str
    """Why this image is shown: ``only dtem is right``, ``only tome is right`` or ``taken evenly``."""

    @property
    def predictions(self) -> dict[str, tuple[int, float]]:
        """By method, ``unmerged`` first: the predicted class and its probability."""
        views = {name: view.probabilities for name, view in self.shown.views.items()}
        return {
            name: (int(each.argmax()), float(each.max()))
            for name, each in {"unmerged": self.shown.unmerged, **views}.items()
        }

    def class_name(self, index: int) -> str:
        """Name of a class; its number where it has none."""
        return str(index) if self.shown.labels is None else self.shown.labels[index]


@dataclass(frozen=True)
class Focus:
    """Tokens on the object after each block, the mean over some images."""

    images: int
    foreground_by: str
    """How the object's patches were determined."""
    even: float
    """Share of the patches that are on the object: what the others would be if merging ignored it."""
    share: dict[str, tuple[float, ...]]
    """By method: share of the tokens that are on the object, after each block."""


def show_pictures(
    handles: Mapping[str, Handle],
    source: Source,
    outcomes: Mapping[str, Outcomes],
    class_names: Sequence[str] | None,
    masks: Masks | None,
) -> list[DemoPicture]:
    """Some images with their groups by both methods, at the r of the handles."""
    reference, trained = outcomes.values()
    positions = _positions(source)
    pictures = []
    for index, reason in choose_images(reference, trained, list(outcomes)):
        name = trained.names[index]
        record = source.read(positions[name])
        image: Any = image_data.open_image(record.image)
        mask = None if masks is None else np.uint8(255) * masks(name)
        shown = show(handles, image, mask=mask, labels=class_names)
        assert isinstance(shown, Visualisation)
        pictures.append(DemoPicture(shown, int(trained.labels[index]), reason))
    return pictures


def choose_images(reference: Outcomes, trained: Outcomes, names: Sequence[str]) -> list[tuple[int, str]]:
    """Indices of `NUM_PICTURES` images with the reason: the first three that only the second method has right, the
    first one that only the first has right, then others evenly spread."""
    only_reference = (reference.correct & ~trained.correct).nonzero().flatten().tolist()
    only_trained = (trained.correct & ~reference.correct).nonzero().flatten().tolist()
    spread = [len(reference) * place // NUM_PICTURES for place in range(NUM_PICTURES)]
    chosen: dict[int, str] = {}
    for indices, reason in (
        (only_trained[:3], f"only {names[1]} is right"),
        (only_reference[:1], f"only {names[0]} is right"),
        (spread, "taken evenly"),
    ):
        for index in indices:
            chosen.setdefault(index, reason)
    return list(chosen.items())[:NUM_PICTURES]


def measure_focus(handles: Mapping[str, Handle], source: Source, masks: Masks | None) -> Focus | None:
    """Share of the tokens on the object, over `FOCUS_IMAGES` images; None where nothing tells the object apart."""
    first = next(iter(handles.values()))
    config = resolve_data_config(first.model)
    drawn = sample(source, FOCUS_IMAGES)
    shares: dict[str, list[list[float]]] = {name: [] for name in handles}
    even: list[float] = []
    for batch in Loader(drawn, eval_transform(config), 25).epoch(0):
        foreground = _foreground(first, batch.images, batch.names, masks)
        if foreground is None:
            return None
        even += foreground.mean(axis=1).tolist()
        for name, handle in handles.items():
            with torch.inference_mode(), eval_mode(handle.model), handle.trace() as trace:
                handle.model(batch.images)
            each = torch.stack(trace.sources, 1).cpu().numpy()  # (image, block, patch)
            shares[name] += [
                [allocation.allocate(block, own).share for block in blocks]
                for blocks, own in zip(each, foreground, strict=True)
            ]
    means = {name: tuple(np.mean(each, axis=0).tolist()) for name, each in shares.items()}
    return Focus(len(even), BY_ATTENTION if masks is None else BY_MASK, float(np.mean(even)), means)


def _foreground(
    handle: Handle, images: Float[Tensor, "b c h w"], names: Sequence[str], masks: Masks | None
) -> Bool[ndarray, "b p"] | None:
    if masks is not None:
        grid: Any = handle.model.patch_embed.grid_size  # type: ignore[union-attr]
        return np.stack([allocation.by_mask(masks(name), tuple(grid)) for name in names])
    attention = class_attention(handle, images)
    return None if attention is None else np.stack([allocation.by_attention(each) for each in attention.cpu()])


def _positions(source: Source) -> dict[str, int]:
    return {source.name(index): index for index in range(source.length or 0)}
