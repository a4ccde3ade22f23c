"""Learning rate, parameter groups, and gradients averaged over processes."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from accelerate import Accelerator


def learning_rate(
    update: int, total: int, peak: float, low: float, warmup: int = 0, progress: float | None = None
) -> float:
    """Linear warm-up, then a cosine from `peak` to `low` (or to `peak`, if that is smaller).

    `progress`: the part of the run that is done, where it is not ``update / total`` (a run limited in time).
    """
    low = min(low, peak)
    angle = math.pi * update / total if progress is None else math.pi * progress
    rate = low + 0.5 * (peak - low) * (1 + math.cos(angle))
    return rate * min(1.0, (update + 1) / warmup) if warmup else rate


def parameter_groups(parameters: Iterable[Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: weight decay for matrices, none for vectors."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def average_gradients(accelerator: "Accelerator", parameters: list[Parameter]) -> None:
    """Average the gradients over all processes, in one reduction."""
    if accelerator.num_processes == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    mean = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="mean")
    for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
