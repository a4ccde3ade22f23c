"""Captioners at work: writing captions, and judging given ones word by word."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtem.handle import Handle
from dtem.tasks.captioning.data import Item
from dtem.tasks.captioning.loss import word_losses
from dtem.tasks.captioning.metric import Scores, score
from dtem.tasks.captioning.style import Style
from dtem.types import DtemError

if TYPE_CHECKING:
    from dtem.tasks.classification.data import Loader

Ready = Callable[[], Any]
"""Puts a model into the state of one contender, and gives it."""


@dataclass
class Written:
    """What one contender made of the images."""

    captions: dict[str, str] = field(default_factory=dict)
    """By image."""
    losses: dict[str, float] = field(default_factory=dict)
    """By image, the cross-entropy of all words that people wrote of it, summed."""
    words: dict[str, int] = field(default_factory=dict)
    """By image, how many those are."""
    turns: list[tuple[int, float]] = field(default_factory=list)
    """Images and seconds of each batch that was captioned."""
    scores: Scores | None = None

    @property
    def loss(self) -> float:
        """Teacher-forced: mean cross-entropy per word."""
        return sum(self.losses.values()) / max(1, sum(self.words.values()))

    def loss_by_image(self) -> list[float]:
        """Mean cross-entropy per word of every image."""
        return [self.losses[name] / max(1, self.words[name]) for name in self.captions]

    @property
    def captions_per_second(self) -> float:
        """Over all batches but the first, which warms up."""
        turns = self.turns[1:] or self.turns
        return sum(count for count, _ in turns) / max(sum(seconds for _, seconds in turns), 1e-9)


@torch.inference_mode()
def write(model: Any, images: Tensor, style: Style) -> list[str]:
    """A caption for each image. `model` has its tokenizer (`loading.load`)."""
    from dtem.adapters.hf_git import look, remembering

    with remembering(model, look(model, images)):
        ids = model.generate(
            pixel_values=images,
            num_beams=style.beams,
            max_new_tokens=style.longest,
            do_sample=False,
            repetition_penalty=1.0,
            length_penalty=1.0,
        )
    texts: list[str] = model.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text.strip() for text in texts]


def read(tokenizer: Any, captions: Sequence[str], longest: int, device: Any) -> tuple[Tensor, Tensor]:
    """Captions as ids and mask, padded at the end: (b, t) each."""
    found = tokenizer(
        list(captions), padding=True, truncation=True, max_length=longest + 2, padding_side="right", return_tensors="pt"
    )
    return found["input_ids"].to(device), found["attention_mask"].to(device)


@torch.inference_mode()
def judge(model: Any, images: Tensor, items: Sequence[Item], style: Style) -> tuple[list[float], list[int]]:
    """For each image the summed cross-entropy of what people wrote of it, and how many words that is.

    The image is encoded once for all its captions: row by row, the first captions of all images, then the second ones.
    """
    most = max(len(item.captions) for item in items)
    texts = [item.captions[index % len(item.captions)] for index in range(most) for item in items]
    ids, mask = read(model.tokenizer, texts, style.longest, images.device)
    losses, follows = word_losses(model(input_ids=ids, attention_mask=mask, pixel_values=images).logits, ids, mask)
    told = torch.tensor([index < len(item.captions) for index in range(most) for item in items], device=images.device)
    sums, words = (
        (part.sum(dim=1) * told).double().view(most, len(items)).sum(dim=0).tolist() for part in (losses, follows)
    )
    return sums, [round(count) for count in words]


def compete(
    contenders: Mapping[str, Ready],
    loader: "Loader",
    items: Sequence[Item],
    style: Style,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Written]:
    """Every contender captions and judges every batch, in changing order, so that none always comes first.

    The labels of `loader` are positions in `items` (`data.Captions`).
    """
    found = {name: Written() for name in contenders}
    names = list(contenders)
    for turn, batch in enumerate(loader.epoch(0)):
        images = batch.images.to(device)
        shown = [items[index] for index in batch.labels.tolist()]
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _take_turn(found[name], contenders[name](), images, shown, style)
        if progress is not None:
            progress(len(shown))
    if not found[names[0]].captions:
        raise DtemError("there is nothing to caption: the data held no image that could be read")
    return found


def _take_turn(own: Written, model: Any, images: Tensor, items: Sequence[Item], style: Style) -> None:
    start = _now(images)
    captions = write(model, images, style)
    own.turns.append((len(items), _now(images) - start))
    losses, words = judge(model, images, items, style)
    for item, caption, loss, count in zip(items, captions, losses, words, strict=True):
        own.captions[item.name], own.losses[item.name], own.words[item.name] = caption, loss, count


def _now(images: Tensor) -> float:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return time.perf_counter()


def join(parts: Sequence[Written]) -> Written:
    """What several processes have made of their shares."""
    whole = Written()
    for part in parts:
        whole.captions |= part.captions
        whole.losses |= part.losses
        whole.words |= part.words
        whole.turns += part.turns
    return whole


def scored(written: Written, items: Sequence[Item]) -> Written:
    """With the metrics, against what people wrote."""
    people = {item.name: item.captions for item in items}
    written.scores = score(written.captions, {name: people[name] for name in written.captions})
    return written


def at_rates(handle: Handle, rates: Sequence[str]) -> dict[str, Ready]:
    """The patched model at each r, by its text. Every r is checked (and a budget solved) here, once."""
    merger = handle.merger
    before, found = (merger.schedule, merger.asked), {}
    try:
        for rate in rates:
            handle.r = rate
            found[rate] = _at(handle, merger.schedule)
    finally:
        merger.schedule, merger.asked = before
    return found


def _at(handle: Handle, schedule: Any) -> Ready:
    def ready() -> Any:
        handle.merger.schedule = schedule
        return handle.model

    return ready
