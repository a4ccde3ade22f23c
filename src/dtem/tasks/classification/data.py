"""Batches for training and evaluation, the same in every run.

The order of an epoch depends on (seed, epoch) alone and the augmentation of a sample on (seed, epoch, position) alone:
not on workers, processes, or where a run was interrupted. So a run resumes with exactly the batches that it would have
seen, and two processes see together what one would see with twice the batch.
"""

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtem.tasks.classification.augment import (
    Transform,
    eval_transform,
    mix,
    mixup_of,
    seeded,
    train_transform,
)
from dtem.tasks.classification.augmentation import Augmentation
from dtem.tasks.classification.sources import Record, Source
from dtem.types import DtemError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Augmentation", "Batch", "Loader", "eval_transform", "mix", "mixup_of", "none_left", "train_transform"]

PATIENCE = 100  # unreadable images in a row, after which it is not the images' fault
THINNEST = 100
"""Images that are longer than so many times their width are refused."""


class Batch(NamedTuple):
    """Images of one step, as far as they fall to this process."""

    images: Tensor  # (b, c, h, w)
    labels: Tensor  # (b,) int64, -1 where there is none
    names: list[str]


class Loader:
    """Batches from a source.

    Args:
        transform: from `eval_transform` or `train_transform`.
        batch: images per process and step; a step takes the next ``batch * world`` images of the epoch.
        shuffle: a new order every epoch. This is training: an unreadable image is replaced by the next one, so that
            batches keep their size (in a stream by the next of its batch). Otherwise it is left out.
        rank, world: this process and how many there are. Each takes its contiguous part of every step.
        workers: processes that decode; 0 decodes in this one.
        drop_last: leave out the last step if it is not full. Training on several processes needs that.
        bad: what to do about an unreadable image: ``skip`` and note it in `skipped`, or ``stop``.
        classes: size of the head; a label outside of it is an error, before the first step if the source knows them.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        drop_last: bool = False,
        bad: str = "skip",
        classes: int | None = None,
    ) -> None:
        if batch < 1 or workers < 0 or seed < 0:
            raise DtemError(f"batch = {batch} must be 1 or more; workers = {workers} and seed = {seed} 0 or more")
        if not 0 <= rank < world:
            raise DtemError(f"rank = {rank} must be one of 0 to {world - 1}, for world = {world}")
        if bad not in ("skip", "stop"):
            raise DtemError(f"bad = {bad!r} must be 'skip' or 'stop'")
        self.source = source
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world = world
        self.workers = workers
        self.drop_last = drop_last
        self.bad = bad
        self.skipped: dict[str, str] = {}
        """Reason by name of every image that could not be read so far, by this process."""
        self._transform = transform
        self._classes = classes
        self._together = batch * world
        if self.steps == 0:
            raise DtemError(
                f"{source.spec} holds {source.length} images, less than one step of {self._together}: make the batch "
                f"smaller, or keep the last step (drop_last)"
            )
        labels = None if classes is None else source.labels
        if labels:
            worst = int(np.argmax(labels))
            if fault := _misfit(source.name(worst), labels[worst], classes):
                raise DtemError(fault)

    @property
    def steps(self) -> int | None:
        """Steps of an epoch; None for a stream."""
        if self.source.length is None:
            return None
        whole, rest = divmod(self.source.length, self._together)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches of epoch `number` from step `start` on. What came before is not decoded, in a stream only read.

        A step that leaves this process nothing is passed over: all of it unreadable, or fewer images than processes.
        """
        if number < 0 or start < 0:
            raise DtemError(f"epoch = {number} and start = {start} must be 0 or more")
        order = None if self.source.length is None else self._order(number)
        reader = _Reader(
            self.source, self._transform, (self.seed, number), order, self.shuffle, self._classes, self.bad
        )
        tasks = self._tasks(number, start, order)
        bad: dict[str, str] = {}
        yielded = 0
        for part in self._run(reader, tasks):
            if part.fault:
                raise DtemError(part.fault)
            bad.update(part.bad)
            self.skipped.update(part.bad)
            if part.images is not None:
                yielded += 1
                yield Batch(part.images, torch.tensor(part.labels, dtype=torch.int64), part.names)
        if bad and not yielded:
            raise DtemError(none_left(self.source, bad))

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        assert self.source.length is not None
        if not self.shuffle:
            return np.arange(self.source.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.source.length)

    def _tasks(self, epoch: int, start: int, order: "np.ndarray[Any, Any] | None") -> Iterator[list["_Task"]]:
        """What this process does in each step: positions of the epoch, and with a stream what lies there."""
        first = start * self._together
        if order is None:
            stream = self.source.stream(self.seed if self.shuffle else None, epoch)
            found: Iterator[_Task] = enumerate(itertools.islice(stream, first, None), first)
        else:
            found = ((position, None) for position in range(first, len(order)))
        while step := list(itertools.islice(found, self._together)):
            if len(step) < self._together and self.drop_last:
                return
            if mine := step[len(step) * self.rank // self.world : len(step) * (self.rank + 1) // self.world]:
                yield mine

    def _run(self, reader: "_Reader", tasks: Iterator[list["_Task"]]) -> Iterator["_Part"]:
        if not self.workers:
            return map(reader.__getitems__, tasks)
        from torch.utils.data import DataLoader

        # The generator is for torch's own base seed, which would else be drawn from the caller's.
        dataset: Any = reader  # all that is asked of a dataset is __getitems__
        collate: Any = _as_it_is
        base = torch.Generator()
        return iter(
            DataLoader(dataset, batch_sampler=tasks, num_workers=self.workers, collate_fn=collate, generator=base)
        )


_Task = tuple[int, Record | None]
"""Position in the epoch, and the record there if it comes from a stream."""


class _Part(NamedTuple):
    """What a worker sends back. Errors travel as text: raised in a worker, they would arrive wrapped in its trace."""

    images: Tensor | None
    labels: list[int]
    names: list[str]
    bad: dict[str, str]
    fault: str | None = None


class _Reader:
    """Decodes and augments one process's part of a step, here or in a worker."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        seed: tuple[int, int],
        order: "np.ndarray[Any, Any] | None",
        replace: bool,
        classes: int | None,
        bad: str,
    ) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed
        self.order = order
        self.replace = replace
        self.classes = classes
        self.stop = bad == "stop"

    def __getitems__(self, tasks: Sequence[_Task]) -> _Part:
        bad: dict[str, str] = {}
        samples: list[tuple[Tensor, int, str] | None] = []
        for position, record in tasks:
            found = self._readable(position, record, bad)
            if bad and self.stop:
                name, reason = next(iter(bad.items()))
                return _Part(
                    None, [], [], bad, f"{name} cannot be read: {reason}. Mend or remove it, or skip bad images"
                )
            if found is None:
                samples.append(None)
                continue
            image, label, name = found
            if fault := _misfit(name, label, self.classes):
                return _Part(None, [], [], bad, fault)
            try:
                with seeded(*self.seed, position):
                    samples.append((self.transform(image), label, name))
            except DtemError as error:
                return _Part(None, [], [], bad, str(error))
        kept = [sample for sample in samples if sample is not None]
        if self.replace:
            if not kept:
                return _Part(None, [], [], bad, none_left(self.source, bad))
            kept = [_next(samples, index) for index in range(len(samples))]
        if not kept:
            return _Part(None, [], [], bad)
        images, labels, names = zip(*kept, strict=True)
        return _Part(torch.stack(images), list(labels), list(names), bad)

    def _readable(
        self, position: int, record: Record | None, bad: dict[str, str]
    ) -> "tuple[Image.Image, int, str] | None":
        """The decoded image at `position`; where it cannot be read and is to be replaced, that of a later position."""
        tries = min(PATIENCE, len(self.order)) if self.order is not None and self.replace and not self.stop else 1
        for shift in range(tries):
            name = record.name if record is not None else ""
            try:
                if self.order is not None:
                    index = int(self.order[(position + shift) % len(self.order)])
                    name = self.source.name(index)
                    record = self.source.read(index)
                assert record is not None
                name = record.name
                return decode(record.image), max(record.label, -1), name
            except Exception as error:  # Pillow and the libraries behind a source raise errors of every kind
                bad[name] = " ".join(str(error).split()) or type(error).__name__
        return None


def check_shape(width: int, height: int) -> None:
    """Refuse a thin strip: resized to the model's height, a small file would fill the memory."""
    if max(width, height) > THINNEST * min(width, height):
        raise DtemError(f"the image is {width} × {height}, more than {THINNEST} times as long as wide")


def decode(image: "bytes | Image.Image") -> "Image.Image":
    """All pixels of the image: a file that is cut off fails here, not later."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    except UnidentifiedImageError as error:  # its own message names a buffer in memory
        raise DtemError("not an image file") from error
    if isinstance(opened, Image.Image):  # a source may give what is decoded in its own way
        check_shape(*opened.size)
    opened.load()
    return opened


def _next(samples: Sequence[tuple[Tensor, int, str] | None], index: int) -> tuple[Tensor, int, str]:
    """The sample at `index`, or else the next one of its batch, begun again at its end."""
    turned = itertools.chain(samples[index:], samples[:index])
    return next(sample for sample in turned if sample is not None)


def _misfit(name: str, label: int, classes: int | None) -> str | None:
    if classes is None or label < classes:
        return None
    return f"{name} has label {label}, but the head has {classes} classes (0 to {classes - 1}); give data that fits it"


def none_left(source: Source, bad: dict[str, str]) -> str:
    """The message where not one image can be read."""
    name, reason = next(iter(bad.items()))
    return f"{source.spec}: tried {len(bad)} images and could read none of them; the first, {name}: {reason}"


def _as_it_is(part: _Part) -> _Part:
    return part
