"""A start for embeddings, before the first update: what the output is sensitive to (`ops.sensitivity`)."""

import functools
import itertools
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from dtem import adapters, ops
from dtem.methods.dense import DenseDtem
from dtem.types import DtemError

if TYPE_CHECKING:
    from dtem.training.loop import Run


def sense(run: "Run") -> None:
    """Run `config.sense` batches without merging, and start every embedding from what was found, over all processes.

    The batches are the first of the first epoch, so that a run that is begun again senses the same.
    """
    method, accelerator = run.handle.method, run.accelerator
    if not isinstance(method, DenseDtem):
        raise DtemError(
            f"sense = {run.config.sense} goes with method 'dtem' on a Segmenter, not with {method.name!r} on "
            f"{run.handle.host.name}: leave it out"
        )
    total: list[ops.Moments] = []
    method.sensing = True
    try:
        batches = itertools.islice(run.task.loader.epoch(0), run.config.sense)
        bar = tqdm(batches, "sensing", run.config.sense, disable=not accelerator.is_main_process)
        for index, batch in enumerate(bar):
            torch.manual_seed(run.number(3, accelerator.process_index, index))
            found = _batch(run, batch, index)
            total = [mine.plus(theirs) for mine, theirs in zip(total, found, strict=True)] if total else found
    finally:
        method.sensing = False
    method.sense([ops.Moments(*(accelerator.reduce(part, "sum") for part in each)) for each in total])


def _batch(run: "Run", batch: object, index: int) -> list[ops.Moments]:
    """Of every component."""
    own = adapters.Auxiliary()
    phase = run.plan.phases[0]
    student = functools.partial(run.student, phase, run.schedules[phase.rates[0]], own)
    with run.accelerator.autocast():
        readings = run.task.readings(batch, run.number(4, run.accelerator.process_index, index), student)
    nudges = [offer.nudge for offer in own.offers]
    gradients = [torch.autograd.grad(reading, nudges, retain_graph=True) for reading in readings]
    return [
        ops.moments(offer.x, torch.stack(each), offer.prefix)
        for offer, each in zip(own.offers, zip(*gradients, strict=True), strict=True)
    ]
