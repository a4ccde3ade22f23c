"""Running classifiers over labelled images.

Decoding an image costs about as much as a small model's forward, so every batch is read once, and all contenders run
on it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtem import schedule as schedules
from dtem.adapters import Merger, asked
from dtem.handle import Handle
from dtem.tasks.classification import sources
from dtem.tasks.classification.outcomes import KEPT, Outcomes
from dtem.types import DtemError

if TYPE_CHECKING:
    from dtem.tasks.classification.data import Batch, Loader

Forward = Callable[[Tensor], Tensor]
"""Images -> logits."""
Progress = Callable[[int], None]
"""Told after every batch how many images it held."""


def evaluate(
    model: nn.Module,
    loader: "Loader",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    limit: int | None = None,
) -> Outcomes:
    """What `model`, as it stands, says about every image. It runs in eval mode and is left in the mode it was in.

    Args:
        model: on `device` already.
        loader: of labelled images.
        device: where the images go.
        dtype: autocast to this type; None: the model's own precision.
        progress: called with the number of images after every batch.
        limit: stop after this many images.
    """
    with evaluating(model):
        return compete({"": model}, loader, device, dtype, progress, limit)[""]


def sweep(
    handle: Handle,
    loader: "Loader",
    rates: Sequence[object],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    limit: int | None = None,
) -> dict[str, Outcomes]:
    """The patched model's outcomes at every r of `rates`, by its text: ``{"0": …, "16": …}``.

    For the rest see `evaluate`. Merging is hard. Afterwards the handle has the r and the mode that it had.
    """
    with evaluating(handle.model):
        return compete(at_rates(handle, rates), loader, device, dtype, progress, limit)


def compete(
    contenders: Mapping[str, Forward],
    loader: "Loader",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    limit: int | None = None,
) -> dict[str, Outcomes]:
    """Run every contender on every batch, in changing order, so that none always comes first. See `evaluate`."""
    names = list(contenders)
    answers: dict[str, list[_Answers]] = {name: [] for name in names}
    images: list[str] = []
    labels: list[Tensor] = []
    device = torch.device(device)
    for turn, batch in enumerate(_batches(loader, limit)):
        truth = _truth(batch)
        first = turn % len(names)
        # Not around the loop: what the loader makes and keeps must stay usable in training.
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            pixels = batch.images.to(device, non_blocking=True)
            for name in names[first:] + names[:first]:
                answers[name].append(_answers(contenders[name](pixels), truth, batch.names))
        images.extend(batch.names)
        labels.append(truth)
        if progress is not None:
            progress(len(batch.names))
    if not images:
        raise DtemError("there is nothing to evaluate: the data held no image that could be read")
    return {
        name: Outcomes(
            images,
            torch.cat(labels),
            torch.cat([answer.predicted for answer in parts]),
            torch.cat([answer.loss for answer in parts]),
        )
        for name, parts in answers.items()
    }


def at_rates(handle: Handle, rates: Sequence[object]) -> dict[str, Forward]:
    """The patched model at each r, by its text, as functions that can be called in any order.

    Every r is checked (and a budget solved) here, once. To be used inside `evaluating`, which puts the handle back.
    """
    merger = handle.merger
    before = merger.schedule, merger.asked
    forwards = {}
    try:
        for rate in rates:
            handle.r = rate
            forwards[str(rate)] = _at(handle, merger.schedule)
    finally:
        merger.schedule, merger.asked = before
    return forwards


def _at(handle: Handle, schedule: schedules.Schedule) -> Forward:
    model = asked(handle.model)

    def forward(images: Tensor) -> Tensor:
        handle.merger.schedule = schedule
        return model(images)

    return forward


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode and, where patched, hard merging. Afterwards every mode, and every r, is what it was."""
    training = {module: module.training for model in models for module in model.modules()}
    slots = [getattr(model, "dtem", None) for model in models]
    mergers = [slot for slot in slots if isinstance(slot, Merger)]
    kept = [(merger, merger.schedule, merger.method.soft) for merger in mergers]
    try:
        for model in models:
            model.eval()
        for merger in mergers:
            merger.method.soft = False
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for merger, schedule, soft in kept:
            merger.schedule, merger.method.soft = schedule, soft


def sample(source: sources.Source, limit: int, seed: int = 0) -> sources.Source:
    """`limit` images of `source`, drawn at random: the first ones would all be of the first classes.

    A stream comes back as it is; of that, `limit` in the functions above takes the first ones.
    """
    if source.length is None or source.length <= limit:
        return source
    drawn = torch.randperm(source.length, generator=torch.Generator().manual_seed(seed))[:limit]
    return sources.Subset(source, drawn.sort().values.tolist())


class _Answers(NamedTuple):
    predicted: Tensor
    loss: Tensor


def _answers(logits: Tensor, labels: Tensor, names: Sequence[str]) -> _Answers:
    """The likeliest classes and the cross-entropy, in float32 on the CPU."""
    logits = logits.float()
    classes = logits.shape[-1]
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        index = int(outside[0])
        raise DtemError(
            f"the image {names[index]!r} has label {int(labels[index])}, the model has classes 0 … {classes - 1}: "
            "give the data and the model that belong together (or --classes)"
        )
    loss = F.cross_entropy(logits, labels.to(logits.device), reduction="none")
    best = logits.topk(min(KEPT, classes)).indices
    return _Answers(F.pad(best, (0, KEPT - best.shape[-1]), value=-1).cpu(), loss.cpu())


def _truth(batch: "Batch") -> Tensor:
    labels = batch.labels.to("cpu", torch.int64)
    if len(missing := (labels == sources.UNLABELLED).nonzero()):
        raise DtemError(
            f"the image {batch.names[int(missing[0])]!r} has no label, so accuracy means nothing: sort the images into "
            "one folder per class, in the order of the model's classes"
        )
    return labels


def _batches(loader: "Loader", limit: int | None) -> "Iterator[Batch]":
    """The batches of one pass, the last cut where the limit falls."""
    left = limit
    for batch in loader.epoch(0):
        count = len(batch.names)
        if left is not None and count >= left:
            yield type(batch)(batch.images[:left], batch.labels[:left], batch.names[:left])
            return
        yield batch
        left = None if left is None else left - count
