"""Training in vision-language models: texts after a question about an image, by the next token's distribution."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dtem.data import sources
from dtem.data.loader import Batch, Loader
from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.answering.ask import prepare
from dtem.tasks.captioning.captions import Captions
from dtem.tasks.captioning.loss import distill_loss
from dtem.tasks.running import at_rates, eval_mode
from dtem.training.next_token import NextToken, TextTokens

if TYPE_CHECKING:
    from PIL import Image


class Divergence(NamedTuple):
    """Of a model with merging from the model without, over some tokens of text."""

    divergence: float
    """KL of the next token's distribution, in nats."""
    loss: float
    """Cross-entropy of the texts."""
    tokens: int


class Answering(NextToken):
    """Images with texts, such as captions, which follow the question of the config; or photographs alone.

    With ``loss="distill"`` the texts need not be right: they are only where the distribution of the next token is
    compared with that of the unmerged model. For photographs alone they are that model's own answers. The best adapter
    is the one of smallest divergence.
    """

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
        self.model = model

    def open_source(self, spec: str) -> Source:
        photographs = os.path.isdir(spec) or spec.partition(":")[0] in sources.SCHEMES
        if photographs and self.config.loss != "distill":
            raise DtemError(
                f"loss = {self.config.loss!r} learns from texts, and {spec} holds images alone: set loss = 'distill', "
                f"or give texts, e.g. {self.example}"
            )
        return sources.open_source(spec) if photographs else super().open_source(spec)

    def prepare(self, batch: Batch, seed: int) -> tuple[tuple[Any, ...], TextTokens]:
        captioned = isinstance(self.source, Captions)
        return self._inputs(batch, self.draw_texts(batch, seed) if captioned else self._answers(batch))

    @torch.no_grad()
    def _answers(self, batch: Batch) -> list[str]:
        """Of the unmerged model, the likeliest token each time."""
        images = batch.images.to(self.accelerator.device, non_blocking=True)
        prompt = {name: part.expand(len(images), -1) for name, part in self.prompt.items()}
        limit = self.config.generation.max_new_tokens
        with eval_mode(self.model), Handle(self.model).at(r=0):
            ids = self.model.generate(**prompt, pixel_values=images, max_new_tokens=limit, do_sample=False)
        answers: list[str] = self.tokenizer.batch_decode(
            ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers

    def _inputs(self, batch: Batch, texts: Sequence[str]) -> tuple[tuple[Any, ...], TextTokens]:
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
        return (inputs,), TextTokens(target_ids, target_mask, len(images))

    def forward(self, model: nn.Module, *inputs: Any) -> Any:
        return model(**inputs[0])

    @torch.no_grad()
    def run_evaluation(self, handle: Handle, loader: Loader) -> dict[str, Any]:
        """The first text of every image, or the unmerged model's answer."""
        runs = at_rates(handle, self.config.eval_rates, lambda inputs: self.logits(self.forward(handle.model, inputs)))
        parts: dict[str, list[Divergence]] = {rate: [] for rate in runs}
        for batch in loader.epoch(0):
            if isinstance(loader.source, Captions):
                texts = [loader.source.items[index].captions[0] for index in batch.labels.tolist()]
            else:
                texts = self._answers(batch)
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
