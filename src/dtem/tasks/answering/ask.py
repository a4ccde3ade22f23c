"""Questions about single images, answered at several r."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dtem.data.images import open_image
from dtem.errors import DtemError, first_line
from dtem.handle import Handle
from dtem.tables import Report, Table
from dtem.tasks import task_of
from dtem.tasks.captioning.generate import decoder_counts_sizes
from dtem.tasks.captioning.generation_config import GenerationConfig
from dtem.tasks.running import at_rates, eval_mode


class Answer(NamedTuple):
    """One answer; `tokens` is the number of image tokens that the language model reads."""

    image: str
    r: str
    tokens: int
    answer: str


@dataclasses.dataclass(frozen=True, repr=False)
class AnswerReport(Report):
    """Outcome of `ask`."""

    model: str
    question: str
    rows: list[Answer]

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "question": self.question, "rows": [row._asdict() for row in self.rows]}

    def parts(self) -> list[Table | str]:
        rows = [tuple(map(str, row)) for row in self.rows]
        return [Table(f"{self.model}: {self.question}", Answer._fields, rows)]


def ask(
    model: Handle | nn.Module,
    images: Sequence[Any],
    question: str,
    r: Sequence[object] = (0, 6),
    *,
    processor: Any = None,
    num_beams: int = 1,
    max_new_tokens: int = 50,
    proportional_decoder: bool = True,
    device: str = "cpu",
) -> AnswerReport:
    """Ask a vision-language model a question about each image, at each r.

    Args:
        model: a patched vision-language model of transformers, or its handle.
        images: files, or images as `dtem.show` takes them. Each is asked about on its own.
        question: the text of the prompt.
        r: tokens removed per block, one or more schedules.
        processor: of transformers, for the model; None: ``model.processor``, which `create_model` sets.
        num_beams: beams of generation.
        max_new_tokens: maximum number of tokens of an answer.
        proportional_decoder: the language model counts merged tokens by their size; False: once.
        device: ``cpu`` or ``cuda``.

    Examples:
        >>> handle = dtem.patch(dtem.create_model("hf:google/paligemma-3b-mix-224"))  # doctest: +SKIP
        >>> print(dtem.ask(handle, ["photo.jpg"], "What is the dog doing?", r=(0, 6)))  # doctest: +SKIP
    """
    handle = model if isinstance(model, Handle) else Handle(model)
    asked: Any = handle.model
    if task_of(asked) != "answering":
        raise DtemError(f"{handle.host.name} answers no questions; try hf:google/paligemma-3b-mix-224")
    processor = processor if processor is not None else getattr(asked, "processor", None)
    if processor is None:
        raise DtemError(
            f"{handle.host.name} has no processor: build it with dtem.create_model from a folder or Hub id that has "
            "one, or give processor = AutoProcessor.from_pretrained(…)"
        )
    GenerationConfig(num_beams=num_beams, max_new_tokens=max_new_tokens)
    names = [str(image) if isinstance(image, str | os.PathLike) else f"image {i}" for i, image in enumerate(images)]
    inputs = [prepare(processor, open_image(image), question).to(device) for image in images]
    asked.to(device)

    @torch.inference_mode()
    def answer(prompt: Any) -> tuple[int, str]:
        ids = asked.generate(
            **prompt.to(asked.dtype), num_beams=num_beams, max_new_tokens=max_new_tokens, do_sample=False
        )
        new = ids[0, prompt["input_ids"].shape[1] :]
        return count_tokens(handle, prompt["input_ids"]), processor.decode(new, skip_special_tokens=True).strip()

    with eval_mode(asked), decoder_counts_sizes(proportional_decoder, handle):
        runs = at_rates(handle, r, answer)
        rows = [
            Answer(name, rate, *run(prompt))
            for name, prompt in zip(names, inputs, strict=True)
            for rate, run in runs.items()
        ]
    return AnswerReport(handle.host.name, question, rows)


def prepare(processor: Any, image: Any, question: str) -> Any:
    """The model's inputs for a question about an image, as its processor makes them.

    A processor with a chat template gets a conversation of one turn, another one the placeholder and the question.
    """
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    else:
        text = f"{processor.image_token}{question}"
    try:
        inputs = processor(images=[image], text=[text], return_tensors="pt")
    except Exception as error:  # processors raise errors of every kind
        kind = type(processor).__name__
        raise DtemError(f"{kind} cannot prepare the image and the question: {first_line(error)}") from error
    inputs.pop("labels", None)
    return inputs


def count_tokens(handle: Handle, ids: torch.Tensor) -> int:
    """Image tokens that the language model reads of a prompt."""
    model: Any = handle.model
    placeholders = int((ids == model.config.image_token_id).sum())
    if handle.host.dense:
        return placeholders
    unmerged = handle.host.patches + handle.host.prefix
    full = model.full_image_tokens
    return placeholders // full * (full - (unmerged - handle.tokens[-1]))
