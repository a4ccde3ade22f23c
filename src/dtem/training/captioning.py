"""Training of GIT captioners."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dtem.data.loader import Batch, Loader
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.captioning import evaluator, metric
from dtem.tasks.captioning.captions import Captions
from dtem.tasks.captioning.outcomes import CaptionOutcomes, pool, with_scores
from dtem.tasks.running import at_rates
from dtem.training.next_token import NextToken, TextTokens


class Captioning(NextToken):
    """Images with captions; the language-modelling loss, next-token distillation, or both.

    Images are resized to the input size without augmentation. The best adapter of a run is the one of highest CIDEr,
    or of lowest loss where CIDEr cannot be computed (it needs Java).
    """

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

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], TextTokens]:
        device, max_tokens = self.accelerator.device, self.config.generation.max_new_tokens
        ids, mask = evaluator.tokenize(self.tokenizer, self.draw_texts(batch, seed), max_tokens, device)
        images = batch.images.to(device, non_blocking=True)
        return (ids, mask, None, images), TextTokens(ids, mask, len(images))

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
