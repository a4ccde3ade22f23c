"""Judging a patched model by its task, on any number of processes, outside of a training run."""

import dataclasses
from typing import Any, NamedTuple

from dtem.handle import Handle
from dtem.training.config import TrainConfig
from dtem.training.loop import open_accelerator
from dtem.training.tasks import open_task


class Judged(NamedTuple):
    """What was found at one r."""

    outcome: Any
    """What the task keeps of every image."""
    metrics: dict[str, float]


def judge(handle: Handle, config: TrainConfig, data_config: dict[str, Any]) -> dict[str, Judged]:
    """The model at each of `config.eval_rates`, on `config.eval_data`, merging hard. Its r is left as it was."""
    accelerator = open_accelerator(config)
    # A task opens its training images too: here those that it is judged on, of which no batch is ever drawn.
    batch = config.accumulate * accelerator.num_processes
    config = dataclasses.replace(config, data=config.eval_data, batch=batch)
    task = open_task(config, handle.model, data_config, accelerator)
    handle.model.to(accelerator.device)
    mode, handle.mode = handle.mode, "hard"
    try:
        return {rate: Judged(part, task.metrics(part)) for rate, part in task.evaluate(handle).items()}
    finally:
        handle.mode = mode
