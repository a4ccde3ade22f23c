"""Outcomes of a cell image by image: files, and paired comparison over seeds."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from dtem.errors import DtemError
from dtem.files import write_file
from dtem.measure.statistics import Difference
from dtem.tasks.captioning.metric import Scores
from dtem.tasks.captioning.outcomes import CaptionOutcomes
from dtem.tasks.classification.outcomes import Outcomes
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes, paired

SMALLER_IS_BETTER = ("loss", "cross_entropy", "kendall")
_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


def outcomes_path(folder: Path, kind: str, key: str) -> Path:
    """The file of a cell's outcomes. `kind` is a task, or "numbers"."""
    plain = "".join(char if char.isalnum() or char in ".%@+-" else "_" for char in key)
    return folder / f"{'' if kind == 'numbers' else 'r'}{plain}.{'json' if kind == 'captioning' else 'safetensors'}"


def save(outcomes: Any, path: Path) -> None:
    """Write the outcomes of a task, or numbers, (images, numbers per image)."""
    if isinstance(outcomes, Tensor):
        write_file(path, to_bytes({"numbers": outcomes.contiguous()}))
    elif isinstance(outcomes, CaptionOutcomes):
        scores = None if outcomes.scores is None else dataclasses.asdict(outcomes.scores)
        fields = {name: getattr(outcomes, name) for name in ("captions", "losses", "words")}
        write_file(path, json.dumps({**fields, "scores": scores}, ensure_ascii=False))
    else:
        outcomes.save(path)


def load(path: Path, kind: str) -> Any:
    """Read what `save` wrote."""
    if kind == "numbers":
        return load_file(path)["numbers"]
    if kind == "segmentation":
        return SegmentationOutcomes.load(path)
    if kind == "classification":
        return Outcomes.load(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DtemError(f"{path} cannot be read: {error}; remove it, and it is made again") from error
    scores = content.pop("scores")
    return CaptionOutcomes(**content, scores=None if scores is None else Scores(**scores))


def compare(kind: str, metric: str, reference: Sequence[Any], own: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Differences of `own` from `reference` (one run per seed each) with 95 % intervals, by metric.

    Metrics are those that the task has image by image; numbers are those of `metric`.
    """
    if kind == "segmentation":
        return {"miou": dataclasses.asdict(paired(list(reference), list(own)))}
    if kind == "numbers":
        pairs = [{metric: b.mean(dim=1) - a.mean(dim=1)} for a, b in zip(reference, own, strict=True)]
    else:
        differences = _caption_differences if kind == "captioning" else _class_differences
        pairs = [differences(a, b) for a, b in zip(reference, own, strict=True)]
    shared = [name for name in pairs[0] if all(name in pair for pair in pairs)]
    return {name: dataclasses.asdict(over_seeds(torch.stack([pair[name] for pair in pairs]))) for name in shared}


def over_seeds(differences: Tensor) -> Difference:
    """The mean of paired differences, (seeds, images), with its normal 95 % interval.

    The variance is the sum of two: over images (of the mean over seeds) and, with two seeds or more, over seeds (of the
    mean over images).
    """
    seeds, images = differences.shape
    differences = differences.double()
    variance = differences.mean(dim=0).var().item() / images if images > 1 else 0.0
    if seeds > 1:
        variance += differences.mean(dim=1).var().item() / seeds
    mean, half = differences.mean().item(), _NORMAL_95 * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half)


def _class_differences(a: Outcomes, b: Outcomes) -> dict[str, Tensor]:
    index_of = {name: index for index, name in enumerate(b.names)}  # the order may differ between processes
    if index_of.keys() != set(a.names):
        raise DtemError("these are not outcomes on the same images; evaluate both on the same data")
    order = torch.tensor([index_of[name] for name in a.names])
    top1 = 100 * (b.correct[order].double() - a.correct.double())
    return {"top1": top1, "loss": b.loss[order].double() - a.loss.double()}


def _caption_differences(a: CaptionOutcomes, b: CaptionOutcomes) -> dict[str, Tensor]:
    if list(a.captions) != list(b.captions):
        raise DtemError("these are not captions of the same images; evaluate both on the same data")
    differences = {"loss": torch.tensor(b.loss_by_image()) - torch.tensor(a.loss_by_image())}
    if a.scores is not None and b.scores is not None and "CIDEr" in a.scores.each and "CIDEr" in b.scores.each:
        differences["CIDEr"] = torch.tensor(b.scores.each["CIDEr"]) - torch.tensor(a.scores.each["CIDEr"])
    return differences


def verdict(differences: dict[str, dict[str, float]], metric: str, alike: bool) -> str:
    """Whether a claim holds, by the 95 % interval of the main metric and, where that includes zero, of the loss."""
    signs = {name: _sign(name, difference) for name, difference in differences.items()}
    main = signs.get(metric, 0)
    loss = signs.get("loss", 0) if metric != "loss" else 0
    if alike:
        return "no: they differ" if main or loss else "no difference can be seen"
    if main:
        return "yes" if main > 0 else "no: the other way round"
    if loss:
        return "in the loss only" if loss > 0 else "no: the loss says the other way round"
    return "not clear"


def _sign(name: str, difference: dict[str, float]) -> int:
    """1 if the whole interval is better, −1 if it is worse, 0 if it includes zero."""
    sign = -1 if name in SMALLER_IS_BETTER else 1
    low, high = sorted((sign * difference["low"], sign * difference["high"]))
    return 1 if low > 0 else -1 if high < 0 else 0
