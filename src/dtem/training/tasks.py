"""What training asks of a task, and the tasks by name. To add one: write its class, add its line here."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from dtem.handle import Handle
from dtem.training.config import TrainConfig
from dtem.types import DtemError

if TYPE_CHECKING:
    from accelerate import Accelerator

TASKS = {
    "captioning": "dtem.training.captioning:Captioning",
    "classification": "dtem.training.classification:Classification",
    "segmentation": "dtem.training.segmentation:Segmentation",
}

READINGS = 2
"""Of the output, per update, where merges are priced: each takes one backward pass."""

Forward = Callable[..., Tensor]
"""What a model takes (images, for some tasks more) to what it says."""


class Batches(Protocol):
    """Training batches. Epoch and step say which they are, whatever was drawn before."""

    skipped: dict[str, str]
    """Images that could not be read, and why."""

    @property
    def steps(self) -> int | None:
        """Batches of an epoch; None: not known."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch `number`, from step `start` on."""


class Task(Protocol):
    """A task's answers, for one run. It is built with the run's settings, the unpatched model, what the model wants of
    images (``timm.data.resolve_data_config``) and the accelerator."""

    @property
    def loader(self) -> Batches:
        """Training batches."""

    def loss(self, batch: Any, seed: int, student: Forward, teacher: Forward) -> Tensor:
        """The loss of one batch, or what it is made of (readings) where merges are priced. `teacher` is called only if
        the loss needs it, and before `student`."""

    def readings(self, batch: Any, seed: int, student: Forward) -> Tensor:
        """Random numbers read off the output of one batch (`ops.pricing`)."""

    def evaluate(self, handle: Handle) -> Mapping[str, Any]:
        """What was found at each of `config.eval_rates`, over all processes; nothing without evaluation data."""

    def score(self, found: Mapping[str, Any]) -> float:
        """One number for all rates, the smaller the better: by this the best of a run is chosen."""

    def metrics(self, part: Any) -> dict[str, float]:
        """The numbers of one rate, by name, the most telling first: for logs, records and tables."""

    def brief(self, part: Any) -> str:
        """The same in a few words."""

    def describe(self) -> dict[str, str]:
        """What the adapter should say about its data."""


def open_task(config: TrainConfig, model: nn.Module, data_config: dict[str, Any], accelerator: "Accelerator") -> Task:
    """The task that `config.task` names."""
    if config.task not in TASKS:
        raise DtemError(f"task = {config.task!r} cannot be trained; choose one of: {', '.join(TASKS)}")
    module, name = TASKS[config.task].split(":")
    task: Task = getattr(importlib.import_module(module), name)(config, model, data_config, accelerator)
    return task


def share_of(config: TrainConfig, world: int) -> int:
    """Images of one pass of one process."""
    share, rest = divmod(config.batch, world * config.accumulate)
    if rest or not share:
        raise DtemError(
            f"batch = {config.batch} cannot be split evenly over {world} processes × {config.accumulate} "
            "accumulation steps; choose a multiple of their product"
        )
    return share
