"""The training loop: a run from its first update to its last, through any number of interruptions.

Everything random is a function of (seed, update): order and augmentation of images (`Loader`), MixUp, the r that is
drawn, stochastic depth. So a checkpoint needs no generator states, and a resumed run equals an uninterrupted one.

The model is not wrapped: after the backward pass of an update, the gradients of all processes are averaged in one
flat reduction. Which parameters learn may then change from update to update.
"""

import copy
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dtem import integrations, ops
from dtem.adapters import storage
from dtem.data.loader import Batch
from dtem.data.sources import Source
from dtem.errors import DtemError, require
from dtem.handle import patch
from dtem.training.checkpoint_store import CheckpointStore, fingerprint
from dtem.training.config import TrainConfig
from dtem.training.fisher_init import init_from_fisher
from dtem.training.logs import Log, check_trackers, per_block
from dtem.training.optimisers import average_gradients, learning_rate, parameter_groups
from dtem.training.phases import Phase, TrainingPlan, activate_phase, make_plan, r_warmup_factor
from dtem.training.stop_signals import StopSignals
from dtem.training.task import TaskBase, open_task

if TYPE_CHECKING:
    from accelerate import Accelerator


class TrainingRun:
    """Model, data and optimisers of one run, and how far it has come. The model is patched in place.

    Args:
        model: unpatched, with its weights; to train the host, built with stochastic depth (``config.drop_path``).
        config: all settings.
        accelerator: by `open_accelerator`.
        signals: that stop the run.
        source: training data, where it is not what `config.data` names.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        accelerator: "Accelerator",
        signals: StopSignals,
        source: Source | None = None,
    ) -> None:
        self.config, self.accelerator, self.signals = config, accelerator, signals
        self.weights = fingerprint(model)
        """Of the host at the start."""
        self.task: TaskBase = open_task(config, model, accelerator, source)
        self.steps_per_epoch = self.task.loader.steps
        """None for a stream."""
        _ = self.task.eval_loader  # opened now: a mistake is found before the first update
        self.total = self._total_updates()
        # A host that learns cannot be its own teacher: distillation needs a copy of the initial one.
        distils = config.loss != "task" and config.mode != "modular"
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False) if distils else None
        self.handle = patch(model, config.method, 0, **config.method_options)
        self.seen_before: list[str] = []
        """Names of the images that the adapter of the start has learned from."""
        if config.adapter:
            self.seen_before = storage.trained_on(storage.start_from(self.handle, config.adapter))
        if config.grad_checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]  # every host has it
        nn.ModuleList(filter(None, (model, self.teacher))).to(accelerator.device)
        self.plan: TrainingPlan = make_plan(config, self.handle)
        self.largest_r = ""
        """The schedule that merges most."""
        self.schedules = self._resolve_schedules()
        self.optimisers = {name: self._optimiser(name) for name in self.plan.parameters}
        self.update = 0
        """Updates that are finished. What a checkpoint holds is always of this update: see `_updating`."""
        self.saved = 0
        """Update of the checkpoint."""
        self.evaluated = 0
        """Update of the last evaluation."""
        self.position = (0, 0)
        """Epoch, and step in it, of the next batch."""
        self.seconds = 0.0
        """Training time so far, evaluations included; the mean of all processes."""
        self.waiting = 0.0
        """Part of it that was spent waiting for images, in seconds of this process."""
        self.best = math.inf
        self.loss = math.nan
        self._updating = False
        """In the middle of an update: parameters are of no update."""
        self.store = CheckpointStore(Path(config.out), accelerator)

    def run(self) -> dict[str, Any]:
        """Train to the end, evaluate, write the files of the run. Returns the outcomes of the last evaluation by r.

        A run that is stopped by a signal saves its last finished update; a note of the exception says so.
        """
        self.signals.deferred = True
        total = None if self.config.max_seconds else self.total
        try:
            with Log(self.store.folder, self.accelerator, total, self.update) as log:
                outcomes = self._train(log)
        except BaseException as error:
            if (self.signals.received or isinstance(error, KeyboardInterrupt)) and self.accelerator.is_main_process:
                if self.saved < self.update and not self._updating:
                    self.store.save(self)
                error.add_note(self._stop_note())
            raise
        self.accelerator.wait_for_everyone()  # for the files of the first process
        self.handle.mode, self.handle.r = "hard", self.final_r
        self.handle.model.eval()
        return outcomes

    def _train(self, log: Log) -> dict[str, Any]:
        started, earlier = time.perf_counter(), self.seconds
        outcomes: dict[str, Any] = {}
        config = self.config
        if config.fisher_init and not self.update:
            with self.signals.immediate():
                init_from_fisher(self)
            self.store.save(self)
        batches = self._batches()
        while True:
            if self._evaluation_due:
                outcomes = self._evaluate(log)
            if self._finished:
                break
            before = time.perf_counter()
            passes, positions = zip(*(next(batches) for _ in range(config.grad_accum_steps)), strict=True)
            self.waiting += time.perf_counter() - before
            self._updating = True
            values = self._step(passes)
            self.update += 1
            self.position = positions[-1]
            self._updating = False
            elapsed = time.perf_counter() - started
            self.seconds, stop = self._average(earlier + elapsed, self.signals.received)
            log.step(self.update, values | {"data/waiting": self.waiting / elapsed}, rates=self.learned)
            if stop or self._evaluation_due or self._due(config.save_every):
                self.store.save(self)
            if stop:
                raise KeyboardInterrupt
        if not outcomes:  # the run was finished before
            outcomes = self._evaluate(log)
        self.waiting /= max(time.perf_counter() - started, 1e-9)
        return outcomes

    def _average(self, *values: float) -> list[float]:
        """The mean of every value over all processes."""
        means: Tensor = self.accelerator.reduce(torch.tensor(values, device=self.accelerator.device), reduction="mean")
        return means.tolist()

    def _stop_note(self) -> str:
        """What is kept of a run that was stopped, and how to go on."""
        total = "" if self.config.max_seconds else f" of {self.total}"
        if not self.saved:
            return "stopped before the first update was saved: nothing is kept, the same command begins anew"
        if self.saved < self.update or self._updating:
            stopped, again = f"in update {self.update + 1}{total}, without saving it", f"after update {self.saved}"
        else:
            stopped, again = f"after update {self.update}{total}", "from there"
        return f"stopped {stopped}; the same command resumes it {again}; {self.store.describe()}"

    def _total_updates(self) -> int:
        config = self.config
        if config.updates:
            return config.updates
        if not config.epochs:
            return 0
        if self.steps_per_epoch is None:
            if config.max_seconds:
                return sys.maxsize
            raise DtemError(
                f"{config.data} is a stream of unknown length: set the number of updates, e.g. updates=1000"
            )
        return max(1, int(config.epochs * self.steps_per_epoch) // config.grad_accum_steps)

    @functools.cached_property
    def _updates_per_epoch(self) -> int:
        if self.steps_per_epoch is None:
            return self.total
        return max(1, self.steps_per_epoch // self.config.grad_accum_steps)

    @property
    def _time_share(self) -> float:
        """The part of `max_seconds` that is over; 0 without a limit."""
        return self.seconds / self.config.max_seconds if self.config.max_seconds else 0.0

    @property
    def _finished(self) -> bool:
        return self.update >= self.total or self._time_share >= 1

    def _due(self, every: int) -> bool:
        return self.update % every == 0 or self._finished

    @property
    def _evaluation_due(self) -> bool:
        """Also in a run that was stopped before or in an evaluation."""
        every = self.config.eval_every or self._updates_per_epoch
        return bool(self.config.eval_data) and self.evaluated < self.update and self._due(every)

    def _resolve_schedules(self) -> dict[str, str]:
        """The schedules of all phases with budgets solved, once. Mistakes, also in those of evaluation, are found."""
        schedules, merged = {}, {}
        for rate in (rate for phase in self.plan.phases for rate in phase.rates):
            self.handle.r = rate
            schedules[rate] = "learned" if self.handle.r == "learned" else str(self.handle.merger.schedule)
            self._check_trainable(rate)
            merged[rate] = sum(self.handle.plan)
        self.largest_r = max(self.plan.phases[0].rates, key=merged.__getitem__)
        for rate in self.config.eval_rates if self.config.eval_data else ():
            self.handle.r = rate
        self.handle.r = 0
        return schedules

    def _check_trainable(self, rate: str) -> None:
        """Refuse a schedule that merges nothing where embeddings are to learn from it."""
        blocks = self.handle.host.num_trainable_blocks
        soft = any(phase.learns == "embeddings" and rate in phase.rates for phase in self.plan.phases)
        if soft and self.handle.r != "learned" and not any(self.handle.plan[:blocks]):
            raise DtemError(
                f"r = {rate} merges nothing in the first {blocks} blocks, so no embedding can learn from it: give r of "
                "1 or more"
            )

    @property
    def final_r(self) -> str:
        """The r of the trained model: the learned one, if there is any, else the first that was trained at."""
        return "learned" if self.learned else self.plan.phases[0].rates[0]

    @property
    def learned(self) -> tuple[int, ...]:
        """Learned r of every block, if the method learns it: rounded in soft mode, else as in inference."""
        return () if self.config.mode == "finetune" else self.handle.method.schedule() or ()

    def _batches(self) -> Iterator[tuple[Batch, tuple[int, int]]]:
        """Batches from `position` on, without end, each with the position after it."""
        epoch, first = self.position
        while True:
            step = first
            for step, batch in enumerate(self.task.loader.epoch(epoch, first), first + 1):
                yield batch, (epoch, step)
            if step == 0:
                raise DtemError(f"{self.config.data} holds too few images for one step of {self.config.batch_size}")
            epoch, first = epoch + 1, 0

    def _step(self, passes: Sequence[Batch]) -> dict[str, float]:
        """One update; returns what is logged."""
        config, phase = self.config, self.plan.phase(self.update)
        generator = torch.Generator().manual_seed(self.seed_for(0))
        rate = self.schedules[phase.rates[int(torch.randint(len(phase.rates), (), generator=generator))]]
        r_factor = r_warmup_factor(self.update, self.total, config.r_warmup)
        if phase.r_from < 1:
            r_factor *= phase.r_from + (1 - phase.r_from) * float(torch.rand((), generator=generator))
        torch.manual_seed(self.seed_for(1, self.accelerator.process_index))
        optimiser = self.optimisers[phase.learns]
        progress = self._time_share if config.max_seconds else None
        peak = self._peak_lr(phase.learns)
        lr = learning_rate(self.update, self.total, peak, config.min_lr, config.warmup, progress)
        for group in optimiser.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.accelerator.device)
        parts: dict[str, Tensor] = {}
        for index, batch in enumerate(passes):
            with self.accelerator.autocast():
                loss, auxiliary = self._pass_loss(batch, index, phase, rate, r_factor)
                loss = loss / len(passes)
            self.accelerator.backward(loss)
            total += loss.detach()
            for name, part in auxiliary.items():
                parts[name] = parts.get(name, torch.zeros_like(total)) + part.detach() / len(passes)
        parameters = self.plan.parameters[phase.learns]
        average_gradients(self.accelerator, parameters)
        self.accelerator.unscale_gradients(optimiser)
        norm = nn.utils.clip_grad_norm_(parameters, config.clip_grad or math.inf)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.loss = float(self.accelerator.reduce(total, reduction="mean"))
        if not math.isfinite(self.loss):
            raise DtemError(
                f"the loss is {self.loss} at update {self.update + 1}: lower the learning rate ({lr:.1e}), or use "
                "dtype = 'float32'"
            )
        values = {"loss": self.loss, "lr": lr, "norm": norm.item(), f"r/{phase.learns}": float(self.handle.plan[0])}
        for name, part in parts.items():
            values[f"loss/{name}"] = float(self.accelerator.reduce(part, reduction="mean"))
        return values

    def _pass_loss(
        self, batch: Any, index: int, phase: Phase, rate: str, r_factor: float
    ) -> tuple[Tensor, integrations.AuxiliaryLosses]:
        """The loss of one forward pass, and the losses of the method in it."""
        auxiliary = integrations.AuxiliaryLosses()
        student = functools.partial(self.student, phase, rate, r_factor, auxiliary)
        seed = self.seed_for(2, self.accelerator.process_index, index)
        if self.config.fisher and phase.learns == "embeddings":
            probes = self.task.fisher_probes(batch, seed, student)
            loss = ops.fisher_loss(probes, auxiliary.merge_candidates)
        else:
            loss = self.task.loss(batch, seed, student, self._run_teacher)
        return sum(auxiliary.values(), loss), auxiliary

    def student(
        self, phase: Phase, rate: str, r_factor: float, auxiliary: integrations.AuxiliaryLosses, *inputs: Tensor
    ) -> Tensor:
        """The output of the model with merging; the losses of the method go into `auxiliary`."""
        activate_phase(self.plan, phase, self.handle, rate, r_factor)
        self.handle.method.train(phase.soft)  # randomness of the method, also beside a host in eval mode
        with self.handle.auxiliary_losses() as losses:
            output: Tensor = self.task.forward(self.handle.model, *inputs)
        auxiliary.update(losses)
        auxiliary.merge_candidates = losses.merge_candidates
        return output

    @torch.no_grad()
    def _run_teacher(self, *inputs: Tensor) -> Tensor:
        """The output of the model without merging."""
        if self.teacher is not None:
            return self.task.forward(self.teacher, *inputs)
        self.handle.mode, self.handle.r = "hard", 0
        return self.task.forward(self.handle.model.eval(), *inputs)

    def _optimiser(self, name: str) -> Any:
        groups = parameter_groups(self.plan.parameters[name], self.config.weight_decay)
        return self.accelerator.prepare(torch.optim.AdamW(groups, lr=self._peak_lr(name)))

    def _peak_lr(self, name: str) -> float:
        return {"embeddings": self.config.lr, "norms": self.config.norm_lr, "host": self.config.host_lr}[name]

    def seed_for(self, *purpose: int) -> int:
        """A seed for one purpose in this update."""
        sequence = np.random.SeedSequence((self.config.seed, self.update, *purpose))
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _evaluate(self, log: Log) -> dict[str, Any]:
        """Outcomes on the evaluation data by r; the best adapter so far is written."""
        self.handle.mode = "hard"
        with self.signals.immediate():
            outcomes = self.task.evaluate(self.handle)
        self.evaluated = self.update
        if not outcomes:
            return {}
        score = self.task.score(outcomes)
        metrics = {rate: self.task.metrics(part) for rate, part in outcomes.items()}
        values = {f"eval/{name}_r{rate}": value for rate, each in metrics.items() for name, value in each.items()}
        summary = "; ".join(
            f"r={rate}: " + ", ".join(f"{name} {value:.4g}" for name, value in each.items())
            for rate, each in metrics.items()
        )
        if self.learned:
            summary += f" at {per_block(self.learned)}"
        better = score < self.best
        log.note(
            self.update,
            {"eval/score": score, **values},
            f"update {self.update}: {summary}{' (best)' if better else ''}",
        )
        if better:
            self.best = score
            self.store.write_adapter(self, best=True)
        self.store.save(self)  # with its score, so that it need not be repeated
        return outcomes


def open_accelerator(config: TrainConfig) -> "Accelerator":
    """An `accelerate.Accelerator` with the precision and the trackers of `config`."""
    accelerate = require("accelerate", "train")
    check_trackers(config.log_with)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        accelerate.state.AcceleratorState._reset_state()  # it would keep the precision of an earlier run
    on_cpus = world > 1 and not torch.accelerator.is_available()  # otherwise accelerate sees one process only
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[config.dtype]
    trackers = {"log_with": list(config.log_with), "project_dir": str(Path(config.out, "trackers"))}
    try:
        accelerator: Accelerator = accelerate.Accelerator(
            mixed_precision=precision, cpu=on_cpus, **(trackers if config.log_with else {})
        )
    except ValueError as error:
        raise DtemError(f"accelerate: {error}") from error
    if accelerator.num_processes < world:
        raise DtemError(
            f"{world} processes were started, and accelerate sees {accelerator.num_processes} of them; start them with "
            "torchrun"
        )
    return accelerator
