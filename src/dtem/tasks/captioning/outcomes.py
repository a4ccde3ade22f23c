"""Captions and caption losses of a captioner, image by image, and the paired comparison of two."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dtem.measure.statistics import Difference, bootstrap
from dtem.tasks.captioning.captions import Item
from dtem.tasks.captioning.metric import Scores, score
from dtem.tasks.running import images_per_second


@dataclass
class CaptionOutcomes:
    """What one variant of a captioner made of the images."""

    captions: dict[str, str] = field(default_factory=dict)
    """Generated caption by image."""
    losses: dict[str, float] = field(default_factory=dict)
    """Summed cross-entropy of all tokens of the reference captions, by image."""
    words: dict[str, int] = field(default_factory=dict)
    """Number of those tokens, by image."""
    turns: list[tuple[int, float]] = field(default_factory=list)
    """Images and seconds of each batch that was captioned."""
    scores: Scores | None = None

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def loss(self) -> float:
        """Teacher-forced cross-entropy, mean over tokens."""
        return sum(self.losses.values()) / max(1, sum(self.words.values()))

    def loss_by_image(self) -> list[float]:
        """Mean cross-entropy per token of every image."""
        return [self.losses[name] / max(1, self.words[name]) for name in self.captions]

    @property
    def captions_per_second(self) -> float:
        """Over all batches but the first, which warms up."""
        return images_per_second(self.turns)


def pool(parts: Sequence[CaptionOutcomes]) -> CaptionOutcomes:
    """Outcomes on disjoint images as one, such as those of several processes."""
    pooled = CaptionOutcomes()
    for part in parts:
        pooled.captions |= part.captions
        pooled.losses |= part.losses
        pooled.words |= part.words
        pooled.turns += part.turns
    return pooled


def with_scores(outcomes: CaptionOutcomes, items: Sequence[Item]) -> CaptionOutcomes:
    """The outcomes with the metrics of their captions against the references."""
    references = {item.name: item.captions for item in items}
    outcomes.scores = score(outcomes.captions, {name: references[name] for name in outcomes.captions})
    return outcomes


def paired(first: CaptionOutcomes, second: CaptionOutcomes) -> dict[str, Difference]:
    """Loss, and CIDEr where it could be computed, of the second minus the first, by a paired bootstrap over images."""
    pairs = {"loss": (first.loss_by_image(), second.loss_by_image())}
    if first.scores is not None and second.scores is not None and "CIDEr" in second.scores.each:
        pairs["CIDEr"] = (first.scores.each["CIDEr"], second.scores.each["CIDEr"])
    return {name: bootstrap(a, b) for name, (a, b) in pairs.items()}
