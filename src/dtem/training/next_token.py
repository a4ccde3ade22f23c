"""What training of captioners and of vision-language models shares: texts of images, and losses of the next token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtem.data.loader import Batch
from dtem.data.sources import Source
from dtem.data.transforms import Transform, eval_transform
from dtem.tasks.captioning.captions import Captions, open_captions
from dtem.tasks.captioning.loss import distill_loss, fisher_probes, task_loss
from dtem.training.task import NUM_PROBES, TaskBase


class TextTokens(NamedTuple):
    """Reference texts of a batch, and the number of its images."""

    ids: Tensor
    mask: Tensor
    num_images: int


class NextToken(TaskBase):
    """Base of the tasks whose data are images with texts; images are resized without augmentation."""

    example = "captions.json#train"

    def open_source(self, spec: str) -> Source:
        return open_captions(spec)

    def transform(self, source: Source, training: bool) -> Transform:
        return eval_transform(self.data_config)

    def draw_texts(self, batch: Batch, seed: int) -> list[str]:
        """Reference texts of the training images, by `draw_texts`."""
        return draw_texts(self.source, batch, seed, self.config.generation.captions_per_image)

    def logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits

    def task_loss(self, logits: Tensor, target: TextTokens) -> Tensor:
        return task_loss(logits, target.ids, target.mask)

    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: TextTokens) -> Tensor:
        return distill_loss(logits, teacher_logits, target.mask, self.config.distill_temperature)

    def probes(self, logits: Tensor, target: TextTokens) -> Tensor:
        return fisher_probes(logits, target.mask, NUM_PROBES, target.num_images)


def draw_texts(source: Source, batch: Batch, seed: int, count: int) -> list[str]:
    """Random reference texts, `count` for each image, without repetition as far as it has enough.

    The first texts of all images, then the second ones: the order in which GIT repeats images.
    """
    assert isinstance(source, Captions)
    generator = torch.Generator().manual_seed(seed)
    rows: list[Sequence[str]] = []
    for index in batch.labels.tolist():
        captions = source.items[index].captions
        order = torch.randperm(len(captions), generator=generator).tolist()
        rows.append([captions[order[turn % len(order)]] for turn in range(count)])
    return [row[turn] for turn in range(count) for row in rows]
