"""Training in vision-language models: texts after a question about an image, by the next token's distribution."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dtem.data.loader import Batch, Loader
from dtem.data.sources import Source
from dtem.data.transforms import Transform, eval_transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.answering.ask import prepare
from dtem.tasks.captioning.captions import Captions, open_captions
from dtem.tasks.captioning.loss import distill_loss, fisher_probes, task_loss
from dtem.tasks.running import at_rates
from dtem.training.captioning import CaptionTokens, draw_captions
from dtem.training.task import NUM_PROBES, TaskBase

if TYPE_CHECKING:
    from PIL import Image


class Divergence(NamedTuple):
    """Of a model with merging from the model without, over some tokens of text."""

    divergence: float
    """KL of the next token's distribution, in nats."""
    loss: float
    """Cross-entropy of the texts."""
    tokens: int


class Answering(TaskBase):
    """Images with texts, such as captions, which follow the question of the config.

    With ``loss="distill"`` the texts need not be right: they are only where the distribution of the next token is
    compared with that of the unmerged model. The best adapter is the one of smallest divergence.
    """

    example = "captions.json#train"
    eval_batch_size = 8

    def __init__(self, config: Any, model: Any, *arguments: Any) -> None:
        processor = getattr(model, "processor", None)
        if processor is None:
            raise DtemError(f"{type(model).__name__} has no processor; load the model with dtem.create_model")
        super().__init__(config, model, *arguments)
        if config.grad_checkpointing:
            raise DtemError("grad_checkpointing = True is not available here; use a smaller batch_size")
        prompt = prepare(processor, _blank(self.data_config["input_size"]), config.generation.question)
        if prompt["pixel_values"].ndim != 4 or len(prompt["pixel_values"]) != 1:
            raise DtemError(f"{type(model).__name__} cuts images into crops, and training takes one shape of image")
        self.prompt: dict[str, Tensor] = {
            name: prompt[name].to(self.accelerator.device)
            for name in ("input_ids", "attention_mask", "token_type_ids")
            if name in prompt
        }
        self.tokenizer: Any = processor.tokenizer

    def open_source(self, spec: str) -> Captions:
        return open_captions(spec)

    def transform(self, source: Source, training: bool) -> Transform:
        return eval_transform(self.data_config)

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], CaptionTokens]:
        config = self.config.generation
        return self._inputs(batch, draw_captions(self.source, batch, seed, config.captions_per_image))

    def _inputs(self, batch: Batch, texts: Sequence[str]) -> tuple[tuple[Any, ...], CaptionTokens]:
        """The model's inputs, text after prompt; and the text, from the last token of the prompt on."""
        device, end = self.accelerator.device, self.tokenizer.eos_token or ""
        tokens = self.tokenizer(
            [text + end for text in texts],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.config.generation.max_new_tokens + 1,
            return_tensors="pt",
        ).to(device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        rows = {name: part.expand(len(texts), -1) for name, part in self.prompt.items()}
        inputs = {
            "input_ids": torch.cat([rows["input_ids"], ids], dim=1),
            "attention_mask": torch.cat([rows["attention_mask"], mask], dim=1),
            "logits_to_keep": ids.shape[1] + 1,
        }
        if "token_type_ids" in rows:  # the answer is read from left to right
            inputs["token_type_ids"] = torch.cat([rows["token_type_ids"], torch.ones_like(ids)], dim=1)
        images = batch.images.to(device, non_blocking=True)
        inputs["pixel_values"] = images.repeat(len(texts) // len(images), 1, 1, 1)
        target_ids = torch.cat([rows["input_ids"][:, -1:], ids], dim=1)
        target_mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        return (inputs,), CaptionTokens(target_ids, target_mask, len(images))

    def forward(self, model: nn.Module, *inputs: Any) -> Any:
        return model(**inputs[0])

    def logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits

    def task_loss(self, logits: Tensor, target: CaptionTokens) -> Tensor:
        return task_loss(logits, target.ids, target.mask)

    def distill_loss(self, logits: Tensor, teacher_logits: Tensor, target: CaptionTokens) -> Tensor:
        return distill_loss(logits, teacher_logits, target.mask, self.config.distill_temperature)

    def probes(self, logits: Tensor, target: CaptionTokens) -> Tensor:
        return fisher_probes(logits, target.mask, NUM_PROBES, target.num_images)

    @torch.no_grad()
    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        """The first text of every image."""
        assert isinstance(loader.source, Captions)
        runs = at_rates(handle, self.config.eval_rates, lambda inputs: self.logits(self.forward(handle.model, inputs)))
        parts: dict[str, list[Divergence]] = {rate: [] for rate in runs}
        for batch in loader.epoch(0):
            texts = [loader.source.items[index].captions[0] for index in batch.labels.tolist()]
            (inputs,), target = self._inputs(batch, texts)
            with handle.at(r=0):
                teacher = self.logits(self.forward(handle.model, inputs))
            count = int(target.mask[:, 1:].sum())
            for rate, run in runs.items():
                logits = run(inputs)
                divergence = float(distill_loss(logits, teacher, target.mask))
                parts[rate].append(Divergence(divergence, float(self.task_loss(logits, target)), count))
        return {rate: self.pool(each) for rate, each in parts.items()}

    def pool(self, parts: Sequence[Divergence]) -> Divergence:
        total = max(sum(part.tokens for part in parts), 1)
        means = [sum(part[index] * part.tokens for part in parts) / total for index in range(2)]
        return Divergence(means[0], means[1], total)

    def score(self, outcomes: Mapping[str, Divergence]) -> float:
        """The mean divergence."""
        return sum(part.divergence for part in outcomes.values()) / len(outcomes)

    def metrics(self, outcomes: Divergence) -> dict[str, float]:
        return {"divergence": outcomes.divergence, "loss": outcomes.loss}


def _blank(size: tuple[int, int, int]) -> "Image.Image":
    """An image of the model's size, for a prompt that does not depend on it."""
    from PIL import Image

    return Image.fromarray(np.zeros((*size[1:], 3), dtype=np.uint8))
