"""Batches for training and evaluation, the same in every run.

The order of an epoch depends on (seed, epoch) alone, and the augmentation of a sample on (seed, epoch, position) alone:
not on workers, processes, or where a run was interrupted. So a run resumes with exactly the batches that it would have
seen, and two processes see together what one would see with twice the batch size.
"""

import io
import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtem.data.sources import Record, Source
from dtem.data.transforms import Transform, seeded
from dtem.errors import DtemError

if TYPE_CHECKING:
    from PIL import Image

MAX_TRIES = 100
"""Unreadable images in a row after which a sample is given up."""
MAX_ASPECT_RATIO = 100
"""Images that are thinner are refused."""
_Order = np.ndarray[Any, Any]
_Task = tuple[int, Record | None]
"""Position in the epoch, and the record there if it comes from a stream."""
_Sample = tuple[Tensor, int, str]
"""Image, label, name."""


class Batch(NamedTuple):
    """Images of one step that belong to this process."""

    images: Tensor  # (b, c, h, w)
    labels: Tensor  # (b,) int64, -1 for unlabelled
    names: list[str]


@dataclass(eq=False)
class Loader:
    """Batches from a source."""

    source: Source
    transform: Transform
    """From `eval_transform` or `train_transform`."""
    batch_size: int
    """Images per process and step; a step takes the next ``batch_size * world`` images of the epoch."""
    _: KW_ONLY
    seed: int = 0
    """Of order and augmentation."""
    shuffle: bool = False
    """A new order every epoch, for training: an unreadable image is replaced by the next one, so that batches keep
    their size (in a stream by the next of its batch). Otherwise it is left out."""
    rank: int = 0
    """Of this process. Each process takes its contiguous part of every step."""
    world: int = 1
    """Number of processes."""
    workers: int = 0
    """Processes that decode; 0 decodes in this one."""
    drop_last: bool = False
    """Leave out the last step if it is not full. Training on several processes needs that."""
    on_decode_error: str = "skip"
    """What to do about an unreadable image: ``skip`` and note it in `skipped`, or ``stop``."""
    num_classes: int | None = None
    """Size of the head; a label outside of it is an error, before the first step if the source knows the labels."""
    skipped: dict[str, str] = field(default_factory=dict, init=False)
    """Reason by name of every image that this process could not read so far."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 0 or self.seed < 0:
            raise DtemError(
                f"batch_size = {self.batch_size} must be 1 or more; workers = {self.workers} and seed = {self.seed} 0 "
                "or more"
            )
        if not 0 <= self.rank < self.world:
            raise DtemError(f"rank = {self.rank} must be one of 0 to {self.world - 1}, for world = {self.world}")
        if self.on_decode_error not in ("skip", "stop"):
            raise DtemError(f"on_decode_error = {self.on_decode_error!r} must be 'skip' or 'stop'")
        source, self._step_size = self.source, self.batch_size * self.world
        if self.steps == 0:
            raise DtemError(
                f"{source.spec} holds {source.length} images, less than one step of {self._step_size}: make the batch "
                f"smaller, or keep the last step (drop_last)"
            )
        labels = None if self.num_classes is None else source.labels
        if labels:
            largest = int(np.argmax(labels))
            _check_label(source.name(largest), labels[largest], self.num_classes)

    @property
    def steps(self) -> int | None:
        """Steps of an epoch; None for a stream."""
        if self.source.length is None:
            return None
        full, rest = divmod(self.source.length, self._step_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches of epoch `number` from step `start` on. Earlier images are not decoded, in a stream only read.

        A step without images for this process is passed over: all of them unreadable, or fewer than processes.
        """
        if number < 0 or start < 0:
            raise DtemError(f"epoch = {number} and start = {start} must be 0 or more")
        order = self._order(number)
        reader = _Reader(
            self.source,
            self.transform,
            (self.seed, number),
            order,
            replace=self.shuffle,
            num_classes=self.num_classes,
            stop=self.on_decode_error == "stop",
        )
        unreadable: dict[str, str] = {}
        yielded = False
        for part in self._run(reader, self._tasks(number, start, order)):
            if part.error:
                raise DtemError(part.error)
            unreadable |= part.unreadable
            self.skipped |= part.unreadable
            if part.images is not None:
                yielded = True
                yield Batch(part.images, torch.tensor(part.labels, dtype=torch.int64), part.names)
        if unreadable and not yielded:
            raise DtemError(none_left(self.source, unreadable))

    def _order(self, epoch: int) -> _Order | None:
        if self.source.length is None:
            return None
        if not self.shuffle:
            return np.arange(self.source.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.source.length)

    def _tasks(self, epoch: int, start: int, order: _Order | None) -> Iterator[list[_Task]]:
        """The positions of this process in each step, with the records of a stream."""
        first = start * self._step_size
        tasks: Iterator[_Task]
        if order is None:
            stream = self.source.stream(self.seed if self.shuffle else None, epoch)
            tasks = enumerate(itertools.islice(stream, first, None), first)
        else:
            tasks = ((position, None) for position in range(first, len(order)))
        while step := list(itertools.islice(tasks, self._step_size)):
            if len(step) < self._step_size and self.drop_last:
                return
            if own := step[len(step) * self.rank // self.world : len(step) * (self.rank + 1) // self.world]:
                yield own

    def _run(self, reader: "_Reader", tasks: Iterator[list[_Task]]) -> Iterator["_Part"]:
        if not self.workers:
            return map(reader.__getitems__, tasks)
        from torch.utils.data import DataLoader

        dataset: Any = reader  # DataLoader needs only __getitems__
        collate: Any = _identity
        base = torch.Generator()  # for torch's base seed, which would otherwise be drawn from the global generator
        return iter(
            DataLoader(
                dataset,
                batch_sampler=tasks,
                num_workers=self.workers,
                collate_fn=collate,
                generator=base,
                worker_init_fn=_leave_signals_to_parent,
            )
        )


def _leave_signals_to_parent(_worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal; the one that trains or evaluates ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Part(NamedTuple):
    """What a worker returns. Errors are passed as text: raised in a worker, they would arrive wrapped in its trace."""

    images: Tensor | None
    labels: list[int]
    names: list[str]
    unreadable: dict[str, str]
    error: str | None = None


class _Reader(NamedTuple):
    """Decodes and transforms the part of a step that belongs to one process, there or in a worker."""

    source: Source
    transform: Transform
    seed: tuple[int, int]
    order: _Order | None
    replace: bool
    num_classes: int | None
    stop: bool

    def __getitems__(self, tasks: Sequence[_Task]) -> _Part:
        unreadable: dict[str, str] = {}
        try:
            samples = [self._sample(position, record, unreadable) for position, record in tasks]
            readable = [sample for sample in samples if sample is not None]
            if self.replace and not readable:
                raise DtemError(none_left(self.source, unreadable))
        except DtemError as error:
            return _Part(None, [], [], unreadable, str(error))
        if self.replace:
            readable = [_next_readable(samples, index) for index in range(len(samples))]
        if not readable:
            return _Part(None, [], [], unreadable)
        images, labels, names = zip(*readable, strict=True)
        return _Part(torch.stack(images), list(labels), list(names), unreadable)

    def _sample(self, position: int, record: Record | None, unreadable: dict[str, str]) -> _Sample | None:
        """The transformed image at `position`, or None where it cannot be read."""
        decoded = self._decode(position, record, unreadable)
        if unreadable and self.stop:
            name, reason = next(iter(unreadable.items()))
            raise DtemError(f"{name} cannot be read: {reason}. Repair or remove it, or set on_decode_error = 'skip'")
        if decoded is None:
            return None
        image, label, name = decoded
        _check_label(name, label, self.num_classes)
        with seeded(*self.seed, position):
            return self.transform(image), label, name

    def _decode(
        self, position: int, record: Record | None, unreadable: dict[str, str]
    ) -> "tuple[Image.Image, int, str] | None":
        """The decoded image at `position`; where it cannot be read and is to be replaced, that of a later position."""
        tries = min(MAX_TRIES, len(self.order)) if self.order is not None and self.replace and not self.stop else 1
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
                unreadable[name] = " ".join(str(error).split()) or type(error).__name__
        return None


def check_shape(width: int, height: int) -> None:
    """Refuse a thin strip: resized to the model's height, a small file would fill the memory."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise DtemError(f"the image is {width} × {height}, more than {MAX_ASPECT_RATIO} times as long as wide")


def decode(image: "bytes | Image.Image") -> "Image.Image":
    """All pixels of an image: a truncated file fails here, not later."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    except UnidentifiedImageError as error:  # its own message names a buffer in memory
        raise DtemError("not an image file") from error
    if isinstance(opened, Image.Image):  # a source may have its own kind of image, with a `load`
        check_shape(*opened.size)
    opened.load()
    return opened


def _next_readable(samples: Sequence[_Sample | None], index: int) -> _Sample:
    """The sample at `index`, or else the next readable one of its batch, cyclically."""
    return next(sample for sample in (*samples[index:], *samples[:index]) if sample is not None)


def _check_label(name: str, label: int, num_classes: int | None) -> None:
    if num_classes is not None and label >= num_classes:
        raise DtemError(
            f"{name} has label {label}, but the head has {num_classes} classes (0 to {num_classes - 1}); give data "
            "that fits it"
        )


def none_left(source: Source, unreadable: dict[str, str]) -> str:
    """The error message where no image can be read."""
    name, reason = next(iter(unreadable.items()))
    return f"{source.spec}: tried {len(unreadable)} images and could read none of them; the first, {name}: {reason}"


def _identity(part: _Part) -> _Part:
    return part
