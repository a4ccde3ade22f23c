"""Running segmenters over images with masks. Every image is decoded once, and all contenders run on it."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dtem.tasks.classification.data import Loader
from dtem.tasks.classification.sources import Subset
from dtem.tasks.segmentation.inference import Forward, Inference, predict
from dtem.tasks.segmentation.outcomes import Areas, count, join
from dtem.tasks.segmentation.pairs import Pairs
from dtem.tasks.segmentation.views import Transform, split
from dtem.types import DtemError

Progress = Callable[[int], None]
"""Told after every image that it is done."""
OFTEN = 15.0
"""Seconds between savings."""


def compete(
    contenders: Mapping[str, Forward],
    loader: Loader,
    classes: int,
    inference: Inference | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    after: Callable[[dict[str, Areas]], object] | None = None,
) -> dict[str, Areas]:
    """Run every contender on every image, in changing order, so that none always comes first.

    Args:
        contenders: in eval mode, on `device` already.
        loader: of `eval_transform`, one image per batch (they may differ in size).
        classes: how many there are.
        inference: whole image or sliding window.
        after: called now and then with what has been found so far.
    """
    names: list[str] = []
    found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in contenders}
    order, device, saved = list(contenders), torch.device(device), time.monotonic()
    for turn, batch in enumerate(loader.epoch(0)):
        images, truth = split(batch.images.to(device))
        first = turn % len(order)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            for name in order[first:] + order[:first]:
                said = predict(contenders[name], images, inference)
                found[name] += [count(one, mask, classes) for one, mask in zip(said, truth, strict=True)]
        names.extend(batch.names)
        if progress is not None:
            progress(len(batch.names))
        if after is not None and time.monotonic() - saved > OFTEN:
            after(_areas(names, found))
            saved = time.monotonic()
    if not names:
        raise DtemError("there is nothing to evaluate: the data held no image that could be read")
    return _areas(names, found)


def _areas(names: Sequence[str], found: Mapping[str, Sequence[tuple[Tensor, ...]]]) -> dict[str, Areas]:
    return {name: Areas(list(names), *map(torch.stack, zip(*parts, strict=True))) for name, parts in found.items()}


class Kept:
    """Outcomes in a folder, so that an evaluation that was interrupted goes on.

    Args:
        folder: one file for each contender.
        about: what is evaluated, and how; outcomes of something else are refused.
    """

    def __init__(self, folder: Path, about: str, contenders: Sequence[str]) -> None:
        self.folder = folder
        self.about = about
        self.found = {name: part for name in contenders if (part := self._load(name)) is not None}
        shared = min((part.names for part in self.found.values()), key=len, default=[])
        if len(self.found) < len(contenders) or any(p.names[: len(shared)] != shared for p in self.found.values()):
            self.found = {}  # one of them has not begun, or saw other images: begin anew
        self.found = {name: part.first(len(shared)) for name, part in self.found.items()}

    def _load(self, name: str) -> Areas | None:
        from safetensors import safe_open

        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        found = Areas.load(path)
        with safe_open(path, framework="pt") as file:
            about = file.metadata().get("about", "")
        if about != self.about:
            raise DtemError(
                f"{path} is an evaluation of something else ({about}, now: {self.about}): choose another --out, or "
                "remove it"
            )
        return found

    @property
    def done(self) -> frozenset[str]:
        """Images that need not run again."""
        return frozenset(next(iter(self.found.values())).names) if self.found else frozenset()

    def save(self, more: Mapping[str, Areas]) -> dict[str, Areas]:
        """Write what was there together with what is new; returns both."""
        together = {
            name: join([self.found[name], part] if name in self.found else [part]) for name, part in more.items()
        }
        for name, part in together.items():
            part.save(self.folder / f"{name}.safetensors", self.about)
        return together


def images_left(source: Pairs, done: frozenset[str]) -> Subset | None:
    """The pairs that have not been evaluated yet; None: all have been."""
    left = [index for index, name in enumerate(source.names) if name not in done]
    return Subset(source, left) if left else None


def open_loader(source: Pairs | Subset, transform: Transform, workers: int, rank: int = 0, world: int = 1) -> Loader:
    """Images one by one, in order; one that cannot be read is an error: a mean over fewer images would flatter."""
    return Loader(source, transform, 1, rank=rank, world=world, workers=workers, bad="stop")
