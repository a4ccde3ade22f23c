"""Training of GIT captioners."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtem.data.loader import Batch, Loader
from dtem.data.sources import Source
from dtem.data.transforms import Transform, eval_transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.captioning import evaluator, metric
from dtem.tasks.captioning.captions import Captions, open_captions
from dtem.tasks.captioning.loss import distill_loss, fisher_probes, task_loss
from dtem.tasks.captioning.outcomes import CaptionOutcomes, pool, with_scores
from dtem.tasks.running import at_rates
from dtem.training.task import NUM_PROBES, TaskBase


class CaptionTokens(NamedTuple):
    """Reference captions of a batch, and the number of its images."""

    ids: Tensor
    mask: Tensor
    num_images: int


class Captioning(TaskBase):
    """Images with captions; the language-modelling loss, next-token distillation, or both.

    Images are resized to the input size without augmentation. The best adapter of a run is the one of highest CIDEr,
    or of lowest loss where CIDEr cannot be computed (it needs Java).
    """

    example = "captions.json#train"
    eval_batch_size = 16

    def __init__(self, config: Any, model: Any, *arguments: Any) -> None:
        super().__init__(config, model, *arguments)
        self.tokenizer: Any = getattr(model, "tokenizer", None)
        if self.tokenizer is None:
            raise DtemError(f"{type(model).__name__} has no tokenizer; load the captioner with dtem.create_model")
        if config.grad_checkpointing:
            raise DtemError(
                "grad_checkpointing = True is not available for captioning; use a smaller batch_size, or "
                "grad_accum_steps"
            )
        self.cider_problem = metric.check().get("CIDEr", "") if config.eval_data else ""
        """Why CIDEr cannot be computed here; empty: it can."""
        if self.cider_problem:
            help_text = metric.HELP[self.cider_problem]
            warnings.warn(f"the best adapter is chosen by loss: CIDEr {self.cider_problem}; {help_text}", stacklevel=2)

    def open_source(self, spec: str) -> Captions:
        return open_captions(spec)

    def transform(self, source: Source, training: bool) -> Transform:
        return eval_transform(self.data_config)

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], CaptionTokens]:
        device, max_tokens = self.accelerator.device, self.config.generation.max_new_tokens
        ids, mask = evaluator.tokenize(self.tokenizer, self.draw_captions(batch, seed), max_tokens, device)
        images = batch.images.to(device, non_blocking=True)
        return (ids, mask, None, images), CaptionTokens(ids, mask, len(images))

    def draw_captions(self, batch: Batch, seed: int) -> list[str]:
        """As the function of this name, for the training data."""
        return draw_captions(self.source, batch, seed, self.config.generation.captions_per_image)

    def logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits

    def task_loss(self, logits: Tensor, target: CaptionTokens) -> Tensor:
        return task_loss(logits, target.ids, target.mask)

    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: CaptionTokens) -> Tensor:
        return distill_loss(logits, teacher_logits, target.mask, self.config.distill_temperature)

    def probes(self, logits: Tensor, target: CaptionTokens) -> Tensor:
        return fisher_probes(logits, target.mask, NUM_PROBES, target.num_images)

    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        generation = self.config.generation
        captioner = evaluator.captioner(handle.model, generation.num_beams, generation.max_new_tokens)
        variants = at_rates(handle, self.config.eval_rates, captioner)
        return dict(evaluator.run_variants(variants, loader, self._items(loader), self.accelerator.device))

    def evaluate(self, handle: Handle) -> dict[str, CaptionOutcomes]:
        outcomes = super().evaluate(handle)
        return {rate: with_scores(part, self._items(self.eval_loader)) for rate, part in outcomes.items()}

    @staticmethod
    def _items(loader: Loader | None) -> Any:
        assert loader is not None
        assert isinstance(loader.source, Captions)
        return loader.source.items

    def pool(self, parts: Sequence[CaptionOutcomes]) -> CaptionOutcomes:
        return pool(parts)

    def score(self, outcomes: Mapping[str, CaptionOutcomes]) -> float:
        """Minus the mean CIDEr, or the loss."""
        values = [part.loss if self.cider_problem else -_scores(part)["CIDEr"] for part in outcomes.values()]
        return sum(values) / len(values)

    def metrics(self, outcomes: CaptionOutcomes) -> dict[str, float]:
        scores = _scores(outcomes)
        return {**({"CIDEr": scores["CIDEr"]} if scores else {}), **scores, "loss": outcomes.loss}


def _scores(outcomes: CaptionOutcomes) -> dict[str, float]:
    """The metrics that could be computed."""
    assert outcomes.scores is not None
    return {name: value for name, value in outcomes.scores.corpus.items() if isinstance(value, float)}


def draw_captions(source: Source, batch: Batch, seed: int, count: int) -> list[str]:
    """Random reference captions, `count` for each image, without repetition as far as it has enough.

    The first captions of all images, then the second ones: the order in which GIT repeats images.
    """
    assert isinstance(source, Captions)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in batch.labels.tolist():
        captions = source.items[index].captions
        order = torch.randperm(len(captions), generator=generator).tolist()
        rows.append([captions[order[turn % len(order)]] for turn in range(count)])
    return [row[turn] for turn in range(count) for row in rows]
