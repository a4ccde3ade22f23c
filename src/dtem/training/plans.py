"""What learns, and in which steps.

A plan says for every update which parameters it changes, at which r, and whether merging is relaxed meanwhile:

    modular      every update trains the embeddings, through soft merging; the host is frozen and in eval mode
    end-to-end   one of ten updates does that; nine train the host with hard merging, as it will run
    finetune     every update trains the host with hard merging (the baselines)
"""

from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

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


def plan_of(config: TrainConfig, handle: Handle) -> Plan:
    """The plan that `config.mode` names, for this model. Parameters that never learn are frozen for good."""
    method, model = handle.method, handle.model
    soft_rates, host_rates = _split(config.r), _split(config.host_r)
    embeddings = [parameter for parameter in method.parameters() if parameter.requires_grad]
    host = [p for name, p in model.named_parameters() if not name.startswith("dtem.")]
    if config.mode != "finetune" and not method.can_relax():
        raise DtemError(f"method {method.name!r} has no soft mode to learn by; use mode = 'finetune'")
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


def enter(plan: Plan, phase: Phase, handle: Handle, rate: str) -> None:
    """Put the model into the state that `phase` needs."""
    handle.model.train(phase.train)
    handle.mode = "soft" if phase.soft else "hard"
    handle.r = rate
    for name, parameters in plan.parameters.items():
        for parameter in parameters:
            parameter.requires_grad_(name == phase.learns)


def _freeze(parameters: list[Parameter]) -> None:
    nn.ParameterList(parameters).requires_grad_(False)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
