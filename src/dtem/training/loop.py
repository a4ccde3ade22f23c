"""A training run, from the first update to the last, through any number of interruptions.

Everything random is a function of (seed, update): the order and augmentation of images (`Loader`), MixUp, the r that
is drawn, stochastic depth. So a checkpoint needs no generator states, and a resumed run is the uninterrupted one.

The model is not wrapped: after the backward pass of an update, the gradients of all processes are averaged in one
flat reduction. Which parameters learn may then change from update to update.
"""

import copy
import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dtem import adapters, ops
from dtem.handle import Handle, patch
from dtem.training import checkpoint, keep
from dtem.training.config import TrainConfig
from dtem.training.logs import Log, compact
from dtem.training.optimise import average_gradients, groups, learning_rate
from dtem.training.plans import Phase, Plan, enter, grown, options_of, plan_of
from dtem.training.sensing import sense
from dtem.training.tasks import Task, open_task
from dtem.types import DtemError

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclasses.dataclass
class Result:
    """What came of a run."""

    handle: Handle
    """Steers the trained model, in hard mode."""
    folder: Path
    updates: int
    loss: float
    """Of the last update."""
    outcomes: dict[str, Any]
    """By r, what the task found on the evaluation data; empty without any."""
    metrics: dict[str, dict[str, float]]
    """By r, the numbers of that."""
    skipped: dict[str, str]
    """Training images that could not be read, and why."""
    waited: float
    """Part of the training time spent waiting for images."""
    first: bool
    """Whether this is the first of all processes, which speaks for them."""


def train(
    model: nn.Module,
    config: TrainConfig,
    data_config: dict[str, Any],
    restart: bool = False,
    named: Mapping[str, Any] | None = None,
) -> Result:
    """Train on `config.data`. The model is patched in place; its run lives in the folder `config.out`.

    Args:
        model: unpatched, with its weights; for end-to-end built with the wanted stochastic depth.
        config: all settings.
        data_config: input size, mean, std and crop: what ``timm.data.resolve_data_config(model=model)`` says.
        restart: throw away an earlier run in `config.out` instead of going on with it.
        named: what ``config.yaml`` is to say of the model: its name, classes and so on.
    """
    return Run(model, config, data_config, restart, named).go()


class Run:
    """The state of a run: model, optimisers, and how far it has come."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        data_config: dict[str, Any],
        restart: bool,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.named = dict(named or {})
        self.weights = checkpoint.fingerprint(model)
        """Of the host, as it came."""
        self.accelerator = open_accelerator(config)
        self.folder = Path(config.out)
        self.task: Task = open_task(config, model, data_config, self.accelerator)
        self.total = self._total()
        # A host that learns cannot be its own teacher: the one that it was is kept.
        distils = config.loss != "task" and config.mode != "modular"
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False) if distils else None
        self.handle = patch(model, config.method, 0, **options_of(config))
        if config.checkpointing and config.task == "captioning":
            raise DtemError("checkpointing does not go with captioning; use a smaller --batch, or --accumulate")
        if config.checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]  # every host has it
        for each in (model, self.teacher):
            if each is not None:
                each.to(self.accelerator.device)
        self.plan: Plan = plan_of(config, self.handle)
        self.merges: dict[str, int] = {}
        """Tokens that each schedule merges in all."""
        self.schedules = self._schedules()
        self.optimisers = {name: self._optimiser(name) for name in self.plan.parameters}
        self.update = 0
        self.position = (0, 0)
        """Epoch, and step in it, of the next batch."""
        self.best = math.inf
        self.loss = math.nan
        keep.prepare(self, restart)
        keep.resume(self)

    def go(self) -> Result:
        """Train to the end, evaluate, and leave the files of the run."""
        started, waited = time.perf_counter(), 0.0
        outcomes: dict[str, Any] = {}
        with Log(self.folder, self.config.log, self.total, self.update, self.accelerator.is_main_process) as log:
            if self.config.sense and not self.update:
                sense(self)
                keep.save(self)
            batches = self._batches()
            while self.update < self.total:
                before = time.perf_counter()
                passes = [next(batches) for _ in range(self.config.accumulate)]
                waited += time.perf_counter() - before
                values = self._step(passes)
                self.update += 1
                values["data/waiting"] = waited / (time.perf_counter() - started)
                log.step(self.update, values, rates=self.learned)
                if self._due(self.config.eval_every or self._per_epoch):
                    outcomes = self._evaluate(log)
                if self._due(self.config.save_every):
                    keep.save(self)
            if not outcomes:  # a run that was finished already
                outcomes = self._evaluate(log)
        self.handle.mode, self.handle.r = "hard", self.rate
        self.handle.model.eval()
        share = waited / max(time.perf_counter() - started, 1e-9)
        skipped = self.task.loader.skipped
        metrics = {rate: self.task.metrics(part) for rate, part in outcomes.items()}
        first = self.accelerator.is_main_process
        return Result(self.handle, self.folder, self.update, self.loss, outcomes, metrics, skipped, share, first)

    def _total(self) -> int:
        if self.config.updates:
            return self.config.updates
        if not self.config.epochs:
            return 0
        if self.task.loader.steps is None:
            raise DtemError(f"{self.config.data} is a stream of unknown length: say how many --updates to make")
        return max(1, int(self.config.epochs * self.task.loader.steps) // self.config.accumulate)

    def _schedules(self) -> dict[str, str]:
        """The schedules of all phases, with budgets solved: once, not in every update. A bad one, or one of those to
        evaluate at, is found before the first."""
        found = {}
        for rate in (rate for phase in self.plan.phases for rate in phase.rates):
            if self.config.schedule == "learned":
                self.handle.aim(rate)
            else:
                self.handle.r = rate
            found[rate] = "learned" if self.handle.r == "learned" else str(self.handle.merger.schedule)
            self._check_learnable(rate)
            plan = self.handle.merger.plan(self.handle.host.patches)
            self.merges[rate] = sum(r for r in plan if isinstance(r, int))
        for rate in self.config.eval_rates if self.config.eval_data else ():
            self.handle.r = rate
        self.handle.r = 0
        return found

    def _check_learnable(self, rate: str) -> None:
        """Embeddings learn from what is merged: refuse a schedule by which nothing is, where the loss can see it."""
        learning = self.handle.host.learning
        soft = any(phase.learns == "embeddings" and rate in phase.rates for phase in self.plan.phases)
        if soft and self.handle.r != "learned" and not any(self.handle.plan[:learning]):
            raise DtemError(
                f"r = {rate} merges nothing in the first {learning} blocks, so no embedding can learn from it: give "
                "--r 1 or more"
            )

    @property
    def rate(self) -> str:
        """The r to leave the model with: the learned one, if there is such, else the first that was trained at."""
        return "learned" if self.learned else self.plan.phases[0].rates[0]

    @property
    def learned(self) -> tuple[int, ...]:
        """The r of every block, if that is learned: in soft mode the nearest, else those that inference uses."""
        return () if self.config.mode == "finetune" else self.handle.method.schedule() or ()

    @property
    def _per_epoch(self) -> int:
        steps = self.task.loader.steps
        return self.total if steps is None else max(1, steps // self.config.accumulate)

    def _due(self, every: int) -> bool:
        return self.update % every == 0 or self.update == self.total

    def _batches(self) -> Iterator[Any]:
        """Batches from the present position on, for ever; `position` is kept at the next one."""
        epoch, step = self.position
        while True:
            begin = step
            for batch in self.task.loader.epoch(epoch, step):
                step += 1
                self.position = (epoch, step)
                yield batch
            if begin == step == 0:
                raise DtemError(f"{self.config.data} holds too few images for one step of {self.config.batch}")
            epoch, step = epoch + 1, 0
            self.position = (epoch, step)

    def _step(self, passes: list[Any]) -> dict[str, float]:
        """One update."""
        phase = self.plan.phase(self.update)
        drawn = torch.Generator().manual_seed(self.number(0))
        rate = self.schedules[phase.rates[int(torch.randint(len(phase.rates), (), generator=drawn))]]
        process = self.accelerator.process_index
        torch.manual_seed(self.number(1, process))
        optimiser = self.optimisers[phase.learns]
        lr = learning_rate(self.update, self.total, self._peak(phase.learns), self.config.min_lr, self.config.warmup)
        for group in optimiser.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.accelerator.device)
        parts: dict[str, Tensor] = {}
        for index, batch in enumerate(passes):
            own = adapters.Auxiliary()
            with self.accelerator.autocast():
                student = functools.partial(self.student, phase, rate, own)
                loss = self.task.loss(batch, self.number(2, process, index), student, self._teach)
                loss = ops.expected_cost(loss, own.offers) if own.offers else loss
                loss = sum(own.values(), loss) / len(passes)
            self.accelerator.backward(loss)
            total += loss.detach()
            for name, part in own.items():
                parts[name] = parts.get(name, torch.zeros_like(total)) + part.detach() / len(passes)
        parameters = self.plan.parameters[phase.learns]
        average_gradients(self.accelerator, parameters)
        self.accelerator.unscale_gradients(optimiser)
        norm = nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.loss = float(self.accelerator.reduce(total, reduction="mean"))
        if not math.isfinite(self.loss):
            raise DtemError(
                f"the loss is {self.loss} at update {self.update + 1}: lower the learning rate ({lr:.1e}), or use fp32"
            )
        values = {"loss": self.loss, "lr": lr, "norm": norm.item(), f"r/{phase.learns}": float(self.handle.plan[0])}
        for name, part in parts.items():
            values[f"loss/{name}"] = float(self.accelerator.reduce(part, reduction="mean"))
        return values

    def student(self, phase: Phase, rate: str, own: adapters.Auxiliary, *inputs: Tensor) -> Tensor:
        """The logits; what the method has to say of them goes into `own`."""
        enter(self.plan, phase, self.handle, rate, grown(self.update, self.total, self.config.ramp))
        self.handle.method.train(phase.soft)  # what is random in a method is so where it learns, even by a frozen host
        with adapters.auxiliary() as said:
            logits: Tensor = self.handle.model(*inputs)
        own.update(said)
        own.offers = said.offers
        return logits

    @torch.no_grad()
    def _teach(self, *inputs: Tensor) -> Tensor:
        """What the model says without merging."""
        if self.teacher is not None:
            return self.teacher(*inputs)
        self.handle.mode, self.handle.r = "hard", 0
        return self.handle.model.eval()(*inputs)

    def _optimiser(self, name: str) -> Any:
        parameters = groups(self.plan.parameters[name], self.config.weight_decay)
        return self.accelerator.prepare(torch.optim.AdamW(parameters, lr=self._peak(name)))

    def _peak(self, name: str) -> float:
        return self.config.lr if name == "embeddings" else self.config.host_lr

    def number(self, *parts: int) -> int:
        """A seed for one purpose in this update."""
        sequence = np.random.SeedSequence((self.config.seed, self.update, *parts))
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _evaluate(self, log: Log) -> dict[str, Any]:
        self.handle.mode = "hard"
        found = dict(self.task.evaluate(self.handle))
        if not found:
            return found
        score = self.task.score(found)
        values = {"eval/score": score}
        for rate, part in found.items():
            values |= {f"eval/{name}_r{rate}": value for name, value in self.task.metrics(part).items()}
        summary = ", ".join(f"r={rate}: {self.task.brief(part)}" for rate, part in found.items())
        if self.learned:
            summary += f" at {compact(self.learned)}"
        better = score < self.best
        log.note(self.update, values, f"update {self.update}: {summary}{' (best)' if better else ''}")
        if better:
            self.best = score
            keep.write(self, keep.BEST, keep.BEST_HOST)
        return found


def open_accelerator(config: TrainConfig) -> "Accelerator":
    """Of `accelerate`, with the precision that `config` asks for."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise DtemError('training needs the package accelerate: pip install "dtem[train]"') from error
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpus = world > 1 and not torch.accelerator.is_available()  # unless told, each takes itself for the only process
    try:
        accelerator = Accelerator(mixed_precision="no" if config.dtype == "fp32" else config.dtype, cpu=on_cpus)
    except ValueError as error:
        raise DtemError(f"accelerate: {error}") from error
    if accelerator.num_processes < world:
        raise DtemError(
            f"{world} processes were started, and accelerate sees {accelerator.num_processes} of them; start them with "
            "torchrun"
        )
    return accelerator
