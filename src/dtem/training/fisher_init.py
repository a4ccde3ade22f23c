"""Fisher initialisation of embeddings before the first update (`ops.distance_embedding`)."""

import functools
import itertools
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from dtem import integrations, ops
from dtem.data.loader import Batch
from dtem.errors import DtemError
from dtem.methods.dense import DenseDtem

if TYPE_CHECKING:
    from dtem.training.loop import TrainingRun


def init_from_fisher(run: "TrainingRun") -> None:
    """Initialise every embedding from the Fisher information of `config.fisher_init` unmerged batches.

    Moments are summed over all processes. The batches are the first of the first epoch, so that a restarted run gets
    the same initialisation.
    """
    method, accelerator, count = run.handle.method, run.accelerator, run.config.fisher_init
    if not isinstance(method, DenseDtem):
        raise DtemError(
            f"fisher_init = {count} is for method 'dtem' on a Segmenter, not for {method.name!r} on "
            f"{run.handle.host.name}: leave it out"
        )
    total: list[ops.Moments] = []
    method.collecting_fisher = True
    try:
        batches = itertools.islice(run.task.loader.epoch(0), count)
        bar = tqdm(batches, "Fisher initialisation", count, disable=not accelerator.is_main_process)
        for index, batch in enumerate(bar):
            torch.manual_seed(run.seed_for(3, accelerator.process_index, index))
            moments = _batch_moments(run, batch, index)
            total = [mine.plus(theirs) for mine, theirs in zip(total, moments, strict=True)] if total else moments
    finally:
        method.collecting_fisher = False
    method.init_from_fisher([ops.Moments(*(accelerator.reduce(part, "sum") for part in each)) for each in total])


def _batch_moments(run: "TrainingRun", batch: Batch, index: int) -> list[ops.Moments]:
    """Input and gradient moments of every component, over one batch."""
    losses = integrations.AuxiliaryLosses()
    phase = run.plan.phases[0]._replace(learns="embeddings", soft=True, r_from=1.0)  # also if norms alone learn later
    student = functools.partial(run.student, phase, run.schedules[phase.rates[0]], 1.0, losses)
    with run.accelerator.autocast():
        probes = run.task.fisher_probes(batch, run.seed_for(4, run.accelerator.process_index, index), student)
    perturbations = [candidates.perturbation for candidates in losses.merge_candidates]
    gradients = [torch.autograd.grad(probe, perturbations, retain_graph=True) for probe in probes]
    return [
        ops.moments(candidates.x, torch.stack(each), candidates.prefix)
        for candidates, each in zip(losses.merge_candidates, zip(*gradients, strict=True), strict=True)
    ]
