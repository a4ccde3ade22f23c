"""Phases of training: which parameters learn in an update, at which r, with soft or hard merging.

modular      the host is frozen and in eval mode. Updates train the embeddings through soft merging, or the adapter's
             own norms with hard merging as in inference; the two kinds take turns
end-to-end   one in ten updates does that; the others train the host with hard merging, as in inference
finetune     every update trains the host with hard merging (the baselines)
"""

import math
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.training.config import TrainConfig


class Phase(NamedTuple):
    """One kind of update."""

    learns: str
    """``embeddings``, ``norms`` or ``host``: the parameters that change, and their optimiser."""
    soft: bool
    rates: tuple[str, ...]
    """Schedules, of which one is drawn for each update."""
    host_in_train_mode: bool
    """For stochastic depth."""
    r_from: float = 1.0
    """A factor on r is drawn for each update, from this to 1."""


class TrainingPlan(NamedTuple):
    """All phases of a run, and the parameters that learn in them."""

    phases: tuple[Phase, ...]
    first_share: float
    """Share of the updates that belong to the first phase, evenly spaced; the others belong to the last one."""
    parameters: dict[str, list[Parameter]]

    def phase(self, update: int) -> Phase:
        """The phase of an update; the very first belongs to the first."""
        starts = math.ceil(round((update + 1) * self.first_share, 6)) > math.ceil(round(update * self.first_share, 6))
        return self.phases[0] if starts else self.phases[-1]


def make_plan(config: TrainConfig, handle: Handle) -> TrainingPlan:
    """The phases of `config.mode` for this model. Parameters that never learn are frozen; frozen host parameters stay
    frozen."""
    method, model = handle.method, handle.model
    soft_rates, host_rates = _split(config.r), _split(config.host_r)
    affine = [] if method.affine is None else [p for p in method.affine.parameters() if p.requires_grad]
    own = {id(parameter) for parameter in affine}
    embeddings = [p for p in method.parameters() if p.requires_grad and id(p) not in own]
    host = [p for name, p in model.named_parameters() if not name.startswith("dtem.") and p.requires_grad]
    if config.mode == "end-to-end" and not method.has_soft_mode():
        raise DtemError(f"method {method.name!r} has no soft mode to train in; use mode = 'finetune'")
    if config.mode != "modular" and not host:
        raise DtemError(f"mode = {config.mode!r} trains the model, and all of it is frozen (requires_grad is False)")
    if config.mode == "modular":
        _freeze(host)
        learns: dict[str, list[Parameter]] = {}
        phases: list[Phase] = []
        if embeddings and "embeddings" in config.learn and method.has_soft_mode():
            learns["embeddings"] = embeddings
            phases.append(Phase("embeddings", True, soft_rates, False))
        else:
            _freeze(embeddings)
        if affine:
            learns["norms"] = affine
            phases.append(Phase("norms", False, soft_rates, False, config.norm_r_from))
        if not phases:
            raise DtemError(
                f"method {method.name!r} has no trained parts that learn = {', '.join(config.learn)} names; add norms, "
                "or use mode = 'finetune'"
            )
        return TrainingPlan(tuple(phases), 1 - config.norm_share if len(phases) > 1 else 1, learns)
    if config.mode == "finetune":
        _freeze(embeddings)
        return TrainingPlan((Phase("host", False, soft_rates, True),), 1, {"host": host})
    hard = Phase("host", False, host_rates, True)
    if not embeddings:  # soft merging on keys: the soft step changes the host itself
        return TrainingPlan((Phase("host", True, soft_rates, True), hard), 1 / config.embedding_every, {"host": host})
    learns = {"embeddings": embeddings, "host": host}
    return TrainingPlan((Phase("embeddings", True, soft_rates, False), hard), 1 / config.embedding_every, learns)


def r_warmup_factor(update: int, total: int, r_warmup: float) -> float:
    """The factor on r at an update: from 0 to 1 by half a cosine, over the first `r_warmup` part of all updates.

    EViT's keep rate falls from 1 in this way in fine-tuning.
    """
    done = (update + 1) / max(1.0, r_warmup * total)
    return 1.0 if done >= 1 else 0.5 * (1 - math.cos(math.pi * done))


def activate_phase(plan: TrainingPlan, phase: Phase, handle: Handle, rate: str, r_factor: float = 1.0) -> None:
    """Set modes, r and `requires_grad` for `phase`; r is multiplied by `r_factor` and rounded up."""
    handle.model.train(phase.host_in_train_mode)
    handle.mode = "soft" if phase.soft else "hard"
    handle.r = rate
    if r_factor < 1:
        handle.r = [math.ceil(r_factor * r) for r in handle.plan]
    for name, parameters in plan.parameters.items():
        for parameter in parameters:
            parameter.requires_grad_(name == phase.learns)


def _freeze(parameters: list[Parameter]) -> None:
    nn.ParameterList(parameters).requires_grad_(False)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
