"""Captions of single images, at several r."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from dtem.data.images import open_image
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tables import Report, Table
from dtem.tasks import task_of
from dtem.tasks.captioning.evaluator import MAX_NEW_TOKENS, NUM_BEAMS, generate_captions
from dtem.tasks.captioning.generation_config import GenerationConfig
from dtem.tasks.running import at_rates, eval_mode


class Caption(NamedTuple):
    """One caption; `tokens` is the number of image tokens that the decoder reads."""

    image: str
    r: str
    tokens: int
    caption: str


@dataclasses.dataclass(frozen=True, repr=False)
class CaptionReport(Report):
    """Outcome of `caption`."""

    model: str
    rows: list[Caption]

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "rows": [row._asdict() for row in self.rows]}

    def parts(self) -> list[Table | str]:
        return [Table(self.model, Caption._fields, [tuple(map(str, row)) for row in self.rows])]


def caption(
    model: Handle | nn.Module,
    images: Sequence[Any],
    r: Sequence[object] = (0, 13),
    *,
    num_beams: int = NUM_BEAMS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    proportional_decoder: bool = True,
    device: str = "cpu",
) -> CaptionReport:
    """Caption images at each r.

    Args:
        model: a patched GIT captioner, or its handle.
        images: files, or images as `dtem.show` takes them.
        r: tokens removed per block, one or more schedules.
        num_beams: beams of generation.
        max_new_tokens: maximum number of tokens of a caption.
        proportional_decoder: the decoder counts merged tokens by their size; False: once, as in the paper.
        device: ``cpu`` or ``cuda``.

    Examples:
        >>> handle = dtem.patch(dtem.create_model("hf:microsoft/git-base-coco"))  # doctest: +SKIP
        >>> print(dtem.caption(handle, ["photo.jpg"], r=(0, 13)))  # doctest: +SKIP
    """
    handle = model if isinstance(model, Handle) else Handle(model)
    captioner: Any = handle.model
    if task_of(captioner) != "captioning" or not hasattr(captioner, "tokenizer"):
        other = "; dtem.ask asks vision-language models" if task_of(captioner) == "answering" else ""
        raise DtemError(f"{handle.host.name} is not a captioner with a tokenizer; try microsoft/git-base-coco{other}")
    check_generation(captioner, num_beams, max_new_tokens)
    names = [str(image) if isinstance(image, str | os.PathLike) else f"image {i}" for i, image in enumerate(images)]
    opened = [open_image(image) for image in images]
    transform = eval_transform(resolve_data_config(captioner))
    captioner.to(device)

    def describe(image: Any) -> tuple[int, str]:
        (text,) = generate_captions(captioner, transform(image)[None].to(device), num_beams, max_new_tokens)
        return handle.tokens[-1], text

    with eval_mode(captioner), decoder_counts_sizes(proportional_decoder, handle):
        runs = at_rates(handle, r, describe)
        rows = [
            Caption(name, rate, *run(image))
            for name, image in zip(names, opened, strict=True)
            for rate, run in runs.items()
        ]
    return CaptionReport(handle.host.name, rows)


def check_generation(model: Any, num_beams: int, max_new_tokens: int) -> None:
    """Refuse settings below 1, and captions that are longer than the captioner's position embeddings reach."""
    GenerationConfig(num_beams=num_beams, max_new_tokens=max_new_tokens)
    most = model.config.max_position_embeddings - 2  # the first token and the last
    if max_new_tokens > most:
        raise DtemError(f"max_new_tokens = {max_new_tokens} is more than this captioner can write: {most} at most")


@contextlib.contextmanager
def decoder_counts_sizes(proportional: bool, *handles: Handle) -> Iterator[None]:
    """For a while, the decoder counts merged tokens by their size, or, if not `proportional`, once as in the paper."""
    before = [handle.method.config for handle in handles]
    try:
        for handle in handles:
            if not proportional and handle.method.proportional_decoder:
                handle.method.config = dataclasses.replace(handle.method.config, proportional=True)
        yield
    finally:
        for handle, config in zip(handles, before, strict=True):
            handle.method.config = config
