"""Training of image classifiers, and of encoders without a classifier by their features."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtem.data.loader import Batch, Loader
from dtem.data.sources import Source, open_source
from dtem.data.transforms import Transform, create_mixup, eval_transform, mix, train_transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.integrations import as_logits_fn
from dtem.tasks.classification import evaluator
from dtem.tasks.classification.loss import distill_loss, feature_loss, fisher_probes, task_loss
from dtem.tasks.classification.outcomes import Outcomes
from dtem.tasks.outcome_files import pool
from dtem.tasks.running import at_rates
from dtem.training.task import NUM_PROBES, TaskBase


class Classification(TaskBase):
    """Images with labels; without any for distillation."""

    example = "a folder of images"
    eval_batch_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        config = self.config
        self.mixup = create_mixup(config.augmentation, self.num_classes or 1, config.smoothing)
        if self.num_classes is None and (config.loss != "distill" or config.eval_data):
            raise DtemError(
                f"the model has no classifier, so loss = {config.loss!r} and eval_data = {config.eval_data!r} have no "
                "meaning for it: train with loss = 'distill' and without eval_data, and evaluate by `dtem eval --knn`"
            )

    def open_source(self, spec: str) -> Source:
        return open_source(spec)

    def transform(self, source: Source, training: bool) -> Transform:
        if not source.labelled and not training:
            raise DtemError(f"eval_data = {source.spec} has no labels, so accuracy cannot be measured on it")
        if not source.labelled and self.config.loss != "distill":
            raise DtemError(
                f"{source.spec} has no labels, and loss = {self.config.loss!r} needs them: sort the images into one "
                "folder per class, or train with loss = 'distill', which needs none"
            )
        return (
            train_transform(self.data_config, self.config.augmentation)
            if training
            else eval_transform(self.data_config)
        )

    def loader_options(self, source: Source, training: bool) -> dict[str, Any]:
        return {"num_classes": self.num_classes if source.labelled else None}

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], Any]:
        device = self.accelerator.device
        images, target = batch.images.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
        if self.num_classes is None:
            target = torch.full_like(target, -1)  # class folders mean nothing to a model without classes
        if self.mixup is not None:
            images, target = mix(self.mixup, images, target, seed)
        return (images,), target

    def forward(self, model: nn.Module, *inputs: Any) -> Tensor:
        logits: Tensor = as_logits_fn(model)(*inputs)
        return logits

    def task_loss(self, logits: Tensor, target: Any) -> Tensor:
        return task_loss(logits, target, self.config.smoothing)

    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: Any) -> Tensor:
        if self.num_classes is None:
            return feature_loss(logits, teacher_logits)
        return distill_loss(logits, teacher_logits, self.config.distill_temperature)

    def probes(self, logits: Tensor, target: Any) -> Tensor:
        return fisher_probes(logits, NUM_PROBES, self.num_classes is not None)

    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        variants = at_rates(handle, self.config.eval_rates)
        return dict(evaluator.run_variants(variants, loader, self.accelerator.device))

    def pool(self, parts: Sequence[Outcomes]) -> Outcomes:
        return pool(parts)

    def score(self, outcomes: Mapping[str, Outcomes]) -> float:
        """Mean cross-entropy: it is less noisy than accuracy."""
        return sum(part.mean_loss for part in outcomes.values()) / len(outcomes)

    def metrics(self, outcomes: Outcomes) -> dict[str, float]:
        return {"top1": outcomes.top1, "top5": outcomes.top5, "cross_entropy": outcomes.mean_loss}
