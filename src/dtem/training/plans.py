"""What learns, and in which steps.

A plan says for every update which parameters it changes, at which r, and whether merging is relaxed meanwhile:

    modular      every update trains the embeddings, through soft merging; the host is frozen and in eval mode
    end-to-end   one of ten updates does that; nine train the host with hard merging, as it will run
    finetune     every update trains the host with hard merging (the baselines)
"""

import dataclasses
import math
from typing import Any, NamedTuple

from torch import nn
from torch.nn import Parameter

from dtem import methods
from dtem.handle import Handle
from dtem.training.config import TrainConfig
from dtem.types import DtemError


class Phase(NamedTuple):
    """One kind of update."""

    learns: str
    """``embeddings`` or ``host``: the parameters that change, and their optimiser."""
    soft: bool
    rates: tuple[str, ...]
    """One of these schedules is drawn for each update."""
    train: bool
    """Whether the host is in train mode (stochastic depth)."""


class Plan(NamedTuple):
    """All phases of a run, and the parameters that learn in them."""

    phases: tuple[Phase, ...]
    every: int
    """Of so many updates the first belongs to the first phase, the others to the last one."""
    parameters: dict[str, list[Parameter]]

    def phase(self, update: int) -> Phase:
        return self.phases[0] if update % self.every == 0 else self.phases[-1]


def options_of(config: TrainConfig) -> dict[str, Any]:
    """The method's options; where it learns rates only if asked to, a learned schedule asks it."""
    known = {field.name for field in dataclasses.fields(methods.find(config.method).config_class)}
    asked = {"learn_rates": True} if config.schedule == "learned" and "learn_rates" in known else {}
    return config.options | asked


def plan_of(config: TrainConfig, handle: Handle) -> Plan:
    """The plan that `config.mode` names, for this model. Parameters that never learn are frozen for good; those of the
    host that came frozen stay so."""
    method, model = handle.method, handle.model
    learned = config.schedule == "learned"
    soft_rates, host_rates = (f"{config.gflops!r}G",) if learned else _split(config.r), _split(config.host_r)
    embeddings = [parameter for parameter in method.parameters() if parameter.requires_grad]
    host = [p for name, p in model.named_parameters() if not name.startswith("dtem.") and p.requires_grad]
    if learned and method.schedule() is None:
        raise DtemError(f"schedule = 'learned', and method {method.name!r} learns no rates; use method = 'dtem'")
    if config.mode != "finetune" and not method.can_relax():
        raise DtemError(f"method {method.name!r} has no soft mode to learn by; use mode = 'finetune'")
    if config.mode != "modular" and not host:
        raise DtemError(f"mode = {config.mode!r} trains the model, and all of it is frozen (requires_grad is False)")
    if config.mode == "modular":
        if not embeddings:
            raise DtemError(f"method {method.name!r} has no trained parts; use mode = 'finetune'")
        _freeze(host)
        return Plan((Phase("embeddings", True, soft_rates, False),), 1, {"embeddings": embeddings})
    if config.mode == "finetune":
        _freeze(embeddings)
        return Plan((Phase("host", False, soft_rates, True),), 1, {"host": host})
    hard = Phase("host", False, host_rates, True)
    if not embeddings:  # soft merging on keys: the soft step changes the host itself
        return Plan((Phase("host", True, soft_rates, True), hard), config.every, {"host": host})
    learns = {"embeddings": embeddings, "host": host}
    return Plan((Phase("embeddings", True, soft_rates, False), hard), config.every, learns)


def grown(update: int, total: int, ramp: float) -> float:
    """The part of r that is in force at an update: from 0 to 1 by half a cosine, over the first `ramp` of all updates.

    As EViT's keep rate in fine-tuning, which falls from 1 in this way.
    """
    done = (update + 1) / max(1.0, ramp * total)
    return 1.0 if done >= 1 else 0.5 * (1 - math.cos(math.pi * done))


def enter(plan: Plan, phase: Phase, handle: Handle, rate: str, part: float = 1.0) -> None:
    """Put the model into the state that `phase` needs. Of r, only a `part` is in force, but at least one token."""
    handle.model.train(phase.train)
    handle.mode = "soft" if phase.soft else "hard"
    handle.r = rate
    if part < 1:
        handle.r = [math.ceil(part * r) for r in handle.plan]
    for name, parameters in plan.parameters.items():
        for parameter in parameters:
            parameter.requires_grad_(name == phase.learns)


def _freeze(parameters: list[Parameter]) -> None:
    nn.ParameterList(parameters).requires_grad_(False)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
