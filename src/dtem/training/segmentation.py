"""Training of semantic segmenters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dtem.data.loader import Batch, Loader
from dtem.data.sources import Source
from dtem.data.transforms import Transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.outcome_files import pool
from dtem.tasks.running import at_rates
from dtem.tasks.segmentation import evaluator
from dtem.tasks.segmentation.inference import Inference
from dtem.tasks.segmentation.loss import distill_loss, fisher_probes, task_loss
from dtem.tasks.segmentation.mask_datasets import Pairs, open_pairs
from dtem.tasks.segmentation.mask_transforms import eval_transform, split, train_transform
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes
from dtem.training.task import NUM_PROBES, TaskBase


class Segmentation(TaskBase):
    """Images with masks; the losses of classification, pixel by pixel."""

    example = "camvid:FOLDER#train"
    eval_batch_size = 1  # images differ in size

    def open_source(self, spec: str) -> Pairs:
        return open_pairs(spec)

    def transform(self, source: Source, training: bool) -> Transform:
        assert isinstance(source, Pairs)
        count = len(source.classes)
        if count != self.num_classes:
            raise DtemError(
                f"{source.spec} has {count} classes, the model {self.num_classes}: build it with num_classes = {count}"
            )
        if not training:
            return eval_transform(self.data_config, source.classes)
        config = self.config
        return train_transform(self.data_config, config.cropping, config.augmentation.flip, source.classes)

    def loader_options(self, source: Source, training: bool) -> dict[str, Any]:
        return {} if training else {"on_decode_error": "stop"}  # the mean IoU of fewer images is not comparable

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], Any]:
        images, target = split(batch.images.to(self.accelerator.device, non_blocking=True))
        return (images,), target

    def task_loss(self, logits: Tensor, target: Any) -> Tensor:
        return task_loss(logits, target, self.config.smoothing)

    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: Any) -> Tensor:
        return distill_loss(logits, teacher_logits, self.config.distill_temperature)

    def probes(self, logits: Tensor, target: Any) -> Tensor:
        return fisher_probes(logits, NUM_PROBES)

    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        variants, device = at_rates(handle, self.config.eval_rates), self.accelerator.device
        assert self.num_classes is not None
        inference = Inference(self.config.cropping.short_side)
        return dict(evaluator.run_variants(variants, loader, self.num_classes, inference, device))

    def pool(self, parts: Sequence[SegmentationOutcomes]) -> SegmentationOutcomes:
        return pool(parts)

    def score(self, outcomes: Mapping[str, SegmentationOutcomes]) -> float:
        """100 % minus the mean IoU."""
        return 100 - sum(part.miou for part in outcomes.values()) / len(outcomes)

    def metrics(self, outcomes: SegmentationOutcomes) -> dict[str, float]:
        return {
            "miou": outcomes.miou,
            "pixel_accuracy": outcomes.accuracy,
            "class_accuracy": outcomes.class_accuracy,
        }
