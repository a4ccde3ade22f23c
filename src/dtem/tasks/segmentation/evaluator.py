"""Running segmenters over images with masks. Every image is decoded once, and all variants run on it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dtem.data.loader import Batch, Loader
from dtem.data.sources import Subset
from dtem.tasks.outcome_files import pool
from dtem.tasks.running import Forward, run_in_turns
from dtem.tasks.segmentation.inference import Inference, predict
from dtem.tasks.segmentation.mask_datasets import Pairs
from dtem.tasks.segmentation.mask_transforms import split
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes, count_pixels


def run_variants(
    variants: Mapping[str, Forward],
    loader: Loader,
    num_classes: int,
    inference: Inference | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> dict[str, SegmentationOutcomes]:
    """Outcomes of every variant, images -> class scores, on every image; options as for `run_in_turns`.

    `loader` is of `eval_transform`, with one image per batch where they differ in size.
    """

    def batch_outcomes(forward: Forward, batch: Batch) -> SegmentationOutcomes:
        images, targets = split(batch.images)
        masks = predict(forward, images, inference)
        counts = [count_pixels(*pair, num_classes) for pair in zip(masks, targets, strict=True)]
        return SegmentationOutcomes(batch.names, *map(torch.stack, zip(*counts, strict=True)))

    return run_in_turns(variants, loader, batch_outcomes, pool, device, **options)


class OutcomeStore:
    """Outcomes in a folder, so that an interrupted evaluation resumes.

    Args:
        folder: holds one file per variant.
        about: what is evaluated, and how; outcomes of something else are refused.
        variants: names of the variants.
    """

    def __init__(self, folder: Path, about: str, variants: Sequence[str]) -> None:
        self.folder = folder
        self.about = about
        stored = {name: part for name in variants if (part := self._load(name)) is not None}
        shared = min((part.names for part in stored.values()), key=len, default=[])
        if len(stored) < len(variants) or any(part.names[: len(shared)] != shared for part in stored.values()):
            stored = {}  # a variant is new, or saw other images: start again
        self.outcomes = {name: part.first(len(shared)) for name, part in stored.items()}

    def _load(self, name: str) -> SegmentationOutcomes | None:
        path = self.folder / f"{name}.safetensors"
        return SegmentationOutcomes.load(path, self.about) if path.exists() else None

    @property
    def done(self) -> frozenset[str]:
        """Images that have been evaluated."""
        return frozenset(next(iter(self.outcomes.values())).names) if self.outcomes else frozenset()

    def save(self, new: Mapping[str, SegmentationOutcomes]) -> dict[str, SegmentationOutcomes]:
        """Write the stored outcomes together with new ones; returns both."""
        together = {
            name: pool([self.outcomes[name], part] if name in self.outcomes else [part]) for name, part in new.items()
        }
        for name, part in together.items():
            part.save(self.folder / f"{name}.safetensors", self.about)
        return together


def remaining_images(source: Pairs, done: frozenset[str]) -> Subset | None:
    """The pairs that have not been evaluated yet; None: all have been."""
    remaining = [index for index, name in enumerate(source.names) if name not in done]
    return Subset(source, remaining) if remaining else None
