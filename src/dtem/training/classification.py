"""What training asks of a task (`training.tasks`), answered for image classification: batches, a loss, a score."""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtem.handle import Handle
from dtem.tasks.classification import evaluate, outcomes
from dtem.tasks.classification.data import Batch, Loader, eval_transform, mix, mixup_of, train_transform
from dtem.tasks.classification.loss import distill_loss, feature_loss, readings, task_loss
from dtem.tasks.classification.sources import open_source
from dtem.training.config import TrainConfig
from dtem.training.tasks import READINGS, Forward, share_of
from dtem.types import DtemError

if TYPE_CHECKING:
    from accelerate import Accelerator


class Classification:
    """Images with labels, or without any where the model teaches itself."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, data_config: dict[str, Any], accelerator: "Accelerator"
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.classes = int(getattr(model, "num_classes", 0)) or None
        self.mixup = mixup_of(config.augment, self.classes or 1, config.smoothing)
        if self.classes is None and (config.loss != "distill" or config.eval_data):
            raise DtemError(
                f"the model has no classifier, so loss = {config.loss!r} and eval_data = {config.eval_data!r} mean "
                "nothing to it: train with --loss distill and no --eval-data, and judge it by `dtem eval --knn`"
            )
        self.loader = self._training_loader(data_config)
        self.eval_loader = self._evaluation_loader(data_config) if config.eval_data else None

    def _training_loader(self, data_config: dict[str, Any]) -> Loader:
        config, world = self.config, self.accelerator.num_processes
        if not config.data:
            raise DtemError("there are no training images: give a folder with --data")
        source = open_source(config.data)
        if config.loss != "distill" and not source.labelled:
            raise DtemError(
                f"{config.data} has no labels, and loss = {config.loss!r} needs them: sort the images into one folder "
                "per class, or train with --loss distill, which needs none"
            )
        return Loader(
            source,
            train_transform(data_config, config.augment),
            share_of(config, world),
            seed=config.seed,
            shuffle=True,
            rank=self.accelerator.process_index,
            world=world,
            workers=config.workers,
            drop_last=True,
            bad=config.bad,
            classes=self.classes if source.labelled else None,
        )

    def _evaluation_loader(self, data_config: dict[str, Any]) -> Loader:
        source = open_source(self.config.eval_data)
        if not source.labelled:
            raise DtemError(f"eval_data = {self.config.eval_data} has no labels, so accuracy cannot be measured on it")
        return Loader(
            source,
            eval_transform(data_config),
            64,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            workers=self.config.workers,
            bad=self.config.bad,
            classes=self.classes,
        )

    def loss(self, batch: Batch, seed: int, student: Forward, teacher: Forward) -> Tensor:
        """The loss of one batch, or what it is made of where merges are priced. `teacher` is called only if the loss
        needs it, and before `student`."""
        config = self.config
        if config.options.get("priced"):
            return self.readings(batch, seed, student)
        images, target = self._mixed(batch, seed)
        taught = None if config.loss == "task" else teacher(images).float()
        logits = student(images).float()
        parts = []
        if config.loss != "distill":
            parts.append(task_loss(logits, target, config.smoothing))
        if taught is not None:
            parts.append(self._distance(logits, taught))
        return sum(parts[1:], parts[0])

    def readings(self, batch: Batch, seed: int, student: Forward) -> Tensor:
        """Random numbers read off the output of one batch."""
        images, _ = self._mixed(batch, seed)
        return readings(student(images).float(), READINGS, self.classes is not None)

    def _mixed(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels, mixed where the recipe says so."""
        device = self.accelerator.device
        images, target = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
        if self.classes is None:
            target = torch.full_like(target, -1)  # whatever the folders say, there is no class to mix
        return (images, target) if self.mixup is None else mix(self.mixup, images, target, seed)

    def _distance(self, said: Tensor, taught: Tensor) -> Tensor:
        """From what the unmerged model says: between probabilities, or without a classifier between features."""
        if self.classes is None:
            return feature_loss(said, taught)
        return distill_loss(said, taught, self.config.distill_temperature)

    def evaluate(self, handle: Handle) -> dict[str, outcomes.Outcomes]:
        """Outcomes by r, over all processes; nothing without evaluation data."""
        if self.eval_loader is None:
            return {}
        found = evaluate.sweep(handle, self.eval_loader, self.config.eval_rates, self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return found
        from accelerate.utils import gather_object

        return {rate: outcomes.pool(gather_object([part])) for rate, part in found.items()}

    def score(self, found: Mapping[str, outcomes.Outcomes]) -> float:
        """The mean cross-entropy: it moves before the accuracy does."""
        return sum(part.mean_loss for part in found.values()) / len(found)

    def metrics(self, part: outcomes.Outcomes) -> dict[str, float]:
        return {"top1": part.top1, "top5": part.top5, "cross_entropy": part.mean_loss}

    def brief(self, part: outcomes.Outcomes) -> str:
        return f"{part.top1:.2f} % ({part.mean_loss:.4f})"

    def describe(self) -> dict[str, str]:
        """What the adapter should say about its data: the names of the files, where there are not too many."""
        names = self.loader.source.names
        if names is None or len(names) > self.config.list_files:
            return {}
        return {"trained_on": json.dumps(sorted({PurePath(name).name for name in names}))}
