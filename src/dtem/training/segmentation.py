"""What training asks of a task (`training.tasks`), answered for semantic segmentation."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dtem.handle import Handle
from dtem.tasks.classification.data import Batch, Loader
from dtem.tasks.classification.evaluate import at_rates, evaluating
from dtem.tasks.segmentation import evaluate
from dtem.tasks.segmentation.inference import Inference
from dtem.tasks.segmentation.loss import distill_loss, readings, task_loss
from dtem.tasks.segmentation.outcomes import Areas, join
from dtem.tasks.segmentation.pairs import Pairs, open_pairs
from dtem.tasks.segmentation.views import eval_transform, split, train_transform
from dtem.training.config import TrainConfig
from dtem.training.tasks import READINGS, Forward, share_of
from dtem.types import DtemError

if TYPE_CHECKING:
    from accelerate import Accelerator


class Segmentation:
    """Images with masks; cross-entropy of every pixel, or the unmerged model's own answer, or both."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, data_config: dict[str, Any], accelerator: "Accelerator"
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.classes = int(getattr(model, "num_classes", 0))
        source = self._open(config.data, "--data")
        transform = train_transform(data_config, config.views, config.augment.flip, source.classes)
        self.loader = Loader(
            source,
            transform,
            share_of(config, accelerator.num_processes),
            seed=config.seed,
            shuffle=True,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            workers=config.workers,
            drop_last=True,
            bad=config.bad,
        )
        self.eval_loader = None
        if config.eval_data:
            watched = self._open(config.eval_data, "--eval-data")
            ranks = accelerator.process_index, accelerator.num_processes
            self.eval_loader = evaluate.open_loader(
                watched, eval_transform(data_config, watched.classes), config.workers, *ranks
            )

    def _open(self, spec: str, option: str) -> Pairs:
        if not spec:
            raise DtemError(f"there are no training images: give them with {option}, e.g. camvid:FOLDER#train")
        source = open_pairs(spec)
        if len(source.classes) != self.classes:
            raise DtemError(
                f"{spec} has {len(source.classes)} classes, the model {self.classes}: build it with --classes "
                f"{len(source.classes)}"
            )
        return source

    def loss(self, batch: Batch, seed: int, student: Forward, teacher: Forward) -> Tensor:
        """The loss of one batch, or what it is made of where merges are priced. `teacher` is called only if the loss
        needs it, and before `student`."""
        config = self.config
        if config.options.get("priced"):
            return self.readings(batch, seed, student)
        images, target = split(batch.images.to(self.accelerator.device, non_blocking=True))
        taught = None if config.loss == "task" else teacher(images).float()
        logits = student(images).float()
        parts = []
        if config.loss != "distill":
            parts.append(task_loss(logits, target, config.smoothing))
        if taught is not None:
            parts.append(distill_loss(logits, taught, config.distill_temperature))
        return sum(parts[1:], parts[0])

    def readings(self, batch: Batch, seed: int, student: Forward) -> Tensor:
        """Random numbers read off the output of one batch."""
        images, _ = split(batch.images.to(self.accelerator.device, non_blocking=True))
        return readings(student(images).float(), READINGS)

    def evaluate(self, handle: Handle) -> dict[str, Areas]:
        """Areas by r, over all processes; nothing without evaluation data."""
        if self.eval_loader is None:
            return {}
        inference = Inference(self.config.views.short_side)
        with evaluating(handle.model):
            forwards = at_rates(handle, self.config.eval_rates)
            device = self.accelerator.device
            found = evaluate.compete(forwards, self.eval_loader, self.classes, inference, device)
        if self.accelerator.num_processes == 1:
            return found
        from accelerate.utils import gather_object

        return {rate: join(gather_object([part])) for rate, part in found.items()}

    def score(self, found: Mapping[str, Areas]) -> float:
        """What is missing to a mean IoU of 100 %."""
        return 100 - sum(part.miou for part in found.values()) / len(found)

    def metrics(self, part: Areas) -> dict[str, float]:
        return {"miou": part.miou, "pixel_accuracy": part.accuracy, "class_accuracy": part.class_accuracy}

    def brief(self, part: Areas) -> str:
        return f"mIoU {part.miou:.2f} % (pixels {part.accuracy:.2f} %)"

    def describe(self) -> dict[str, str]:
        """What the adapter should say about its data: the names of the files, where there are not too many."""
        names = self.loader.source.names
        if names is None or len(names) > self.config.list_files:
            return {}
        return {"trained_on": json.dumps(sorted(names))}
