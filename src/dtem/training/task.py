"""What training needs of a task: batches, losses, evaluation. `TaskBase` has the parts that all tasks share.

To add a task: subclass `TaskBase`, add its line to `TASKS`, and let `dtem.tasks.task_of` know its models.
"""

import functools
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from dtem.data.labels import num_classes
from dtem.data.loader import Batch, Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import Source
from dtem.data.transforms import Transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks import task_of
from dtem.tasks.running import eval_mode
from dtem.training.config import TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

TASKS = {
    "answering": "dtem.training.answering:Answering",
    "captioning": "dtem.training.captioning:Captioning",
    "classification": "dtem.training.classification:Classification",
    "segmentation": "dtem.training.segmentation:Segmentation",
}
NUM_PROBES = 2
"""Fisher probes of the output per update; each takes one backward pass."""

Forward = Callable[..., Any]
"""Model inputs (images, for some tasks more) -> model output."""


class TaskBase(ABC):
    """A task in one training run.

    Data is opened on first use: evaluation alone needs no training data.

    Args:
        config: settings of the run.
        model: the model, patched or not.
        accelerator: of the run.
        source: training data, where it is not what `config.data` names.
    """

    example: ClassVar[str]
    """A data spec, for messages."""
    eval_batch_size: ClassVar[int]

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        accelerator: "Accelerator",
        source: Source | None = None,
    ) -> None:
        self.config = config
        self.data_config = resolve_data_config(model)
        """Preprocessing of the model."""
        self.accelerator = accelerator
        self.num_classes = num_classes(model) or None
        self._source = source

    @functools.cached_property
    def source(self) -> Source:
        """Training data."""
        if self._source is None and not self.config.data:
            raise DtemError(f"there is no training data: give data, e.g. {self.example}")
        return self.open_source(self.config.data) if self._source is None else self._source

    @functools.cached_property
    def loader(self) -> Loader:
        """Training batches."""
        config, world = self.config, self.accelerator.num_processes
        batch_size, rest = divmod(config.batch_size, world * config.grad_accum_steps)
        if rest or not batch_size:
            raise DtemError(
                f"batch_size = {config.batch_size} cannot be split evenly over {world} processes × "
                f"{config.grad_accum_steps} accumulation steps; choose a multiple of their product"
            )
        return self._loader(self.source, batch_size, training=True, seed=config.seed, shuffle=True, drop_last=True)

    @functools.cached_property
    def eval_loader(self) -> Loader | None:
        """Evaluation batches; None without evaluation data."""
        spec = self.config.eval_data
        return self._loader(self.open_source(spec), self.eval_batch_size, training=False) if spec else None

    def _loader(self, source: Source, batch_size: int, training: bool, **options: Any) -> Loader:
        return Loader(
            source,
            self.transform(source, training),
            batch_size,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            workers=self.config.workers,
            **{"on_decode_error": self.config.on_decode_error, **self.loader_options(source, training), **options},
        )

    @abstractmethod
    def open_source(self, spec: str) -> Source:
        """The dataset of a spec."""

    @abstractmethod
    def transform(self, source: Source, training: bool) -> Transform:
        """Preprocessing of images, with augmentation for training. A dataset that does not fit is refused."""

    def loader_options(self, source: Source, training: bool) -> dict[str, Any]:
        """Further options of the loader."""
        return {}

    def loss(self, batch: Batch, seed: int, student: Forward, teacher: Forward) -> Tensor:
        """The loss of one batch: task loss, distillation, or their sum. `teacher` runs only if the loss needs it, and
        before `student`."""
        inputs, target = self.prepare(batch, seed)
        teacher_logits = None if self.config.loss == "task" else self.logits(teacher(*inputs))
        logits = self.logits(student(*inputs))
        losses = [] if self.config.loss == "distill" else [self.task_loss(logits, target)]
        if teacher_logits is not None:
            losses.append(self.distill_loss(logits, teacher_logits, target))
        return sum(losses[1:], losses[0])

    def fisher_probes(self, batch: Batch, seed: int, student: Forward) -> Tensor:
        """Random projections of the output of one batch, for the Fisher loss (`ops.fisher_loss`)."""
        inputs, target = self.prepare(batch, seed)
        return self.probes(self.logits(student(*inputs)), target)

    @abstractmethod
    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], Any]:
        """Model inputs, and the target of the losses, on the device."""

    def forward(self, model: nn.Module, *inputs: Any) -> Any:
        """The output of the model, with or without merging."""
        return model(*inputs)

    def logits(self, output: Any) -> Tensor:
        """The logits in a model's output."""
        logits: Tensor = output.float()
        return logits

    @abstractmethod
    def task_loss(self, logits: Tensor, target: Any) -> Tensor:
        """The loss against labels."""

    @abstractmethod
    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: Any) -> Tensor:
        """The divergence from the logits of the unmerged model."""

    @abstractmethod
    def probes(self, logits: Tensor, target: Any) -> Tensor:
        """`NUM_PROBES` Fisher probes of the logits."""

    def evaluate(self, handle: Handle) -> dict[str, Any]:
        """Outcomes at each of `config.eval_rates`, over all processes; empty without evaluation data."""
        if self.eval_loader is None:
            return {}
        with eval_mode(handle.model):
            outcomes = self.run_evaluation(handle, self.eval_loader)
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            outcomes = {rate: self.pool(gather_object([part])) for rate, part in outcomes.items()}
        return outcomes

    @abstractmethod
    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        """Outcomes of this process by r."""

    @abstractmethod
    def pool(self, parts: Sequence[Any]) -> Any:
        """The outcomes of all processes as one."""

    @abstractmethod
    def score(self, outcomes: Mapping[str, Any]) -> float:
        """One number over all r, the smaller the better: it selects the best adapter of a run."""

    @abstractmethod
    def metrics(self, outcomes: Any) -> dict[str, float]:
        """Metrics at one r by name, the most important first."""

    def describe(self, seen_before: Sequence[str] = ()) -> dict[str, str]:
        """Notes of the adapter on its data: the names of the training files, where there are not too many, and of those
        that it has learned from before."""
        names = self.source.names
        if names is None or len(names) > self.config.list_files:
            return {"trained_on": json.dumps(sorted(seen_before))} if seen_before else {}
        return {"trained_on": json.dumps(sorted({PurePath(name).name for name in names} | set(seen_before)))}


def open_task(
    config: TrainConfig, model: nn.Module, accelerator: "Accelerator", source: Source | None = None
) -> TaskBase:
    """The task of `model`; the arguments are those of `TaskBase`."""
    if (kind := task_of(model)) not in TASKS:
        raise DtemError(f"{type(model).__name__} is for {kind}, and dtem trains for: {', '.join(TASKS)}")
    module, name = TASKS[kind].split(":")
    task: TaskBase = getattr(importlib.import_module(module), name)(config, model, accelerator, source)
    return task
