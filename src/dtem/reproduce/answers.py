"""What a cell said of every image: kept in files, and compared image by image, over several seeds."""

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

from dtem.files import write_file
from dtem.tasks.classification.outcomes import Difference, Outcomes
from dtem.types import DtemError

SMALLER_IS_BETTER = ("loss", "cross_entropy", "kendall")
_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


def path_of(folder: Path, kind: str, key: str) -> Path:
    """The file of a cell's answers: by task at an r, or "numbers" of another kind."""
    plain = "".join(char if char.isalnum() or char in ".%@+-" else "_" for char in key)
    return folder / f"{'' if kind == 'numbers' else 'r'}{plain}.{'json' if kind == 'captioning' else 'safetensors'}"


def save(outcome: Any, path: Path) -> None:
    """Keep what a task found (`dtem.training.judge`), or numbers, images × what is told of each."""
    if isinstance(outcome, Tensor):
        write_file(path, to_bytes({"numbers": outcome.contiguous()}))
    elif hasattr(outcome, "captions"):
        scores = None if outcome.scores is None else dataclasses.asdict(outcome.scores)
        told = {name: getattr(outcome, name) for name in ("captions", "losses", "words")}
        write_file(path, json.dumps({**told, "scores": scores}, ensure_ascii=False))
    else:
        outcome.save(path)


def load(path: Path, kind: str) -> Any:
    """What `save` kept."""
    if kind == "numbers":
        return load_file(path)["numbers"]
    if kind == "captioning":
        from dtem.tasks.captioning.evaluate import Written
        from dtem.tasks.captioning.metric import Scores

        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DtemError(f"{path} cannot be read: {error}; remove it, and it is made again") from error
        scores = None if found["scores"] is None else Scores(**found["scores"])
        return Written(found["captions"], found["losses"], found["words"], scores=scores)
    if kind == "segmentation":
        from dtem.tasks.segmentation.outcomes import Areas

        return Areas.load(path)
    return Outcomes.load(path)


def compare(kind: str, metric: str, reference: Sequence[Any], own: Sequence[Any]) -> dict[str, dict[str, float]]:
    """How `own` differs from `reference`, one run of each per seed, with 95 % intervals: by the metrics that a task has
    for every image, or by `metric`, which numbers are."""
    if kind == "segmentation":
        from dtem.tasks.segmentation.outcomes import paired

        return {"miou": dataclasses.asdict(paired(list(reference), list(own)))}
    if kind == "numbers":
        pairs = [{metric: b.mean(dim=1) - a.mean(dim=1)} for a, b in zip(reference, own, strict=True)]
    elif kind == "captioning":
        pairs = [_captions(a, b) for a, b in zip(reference, own, strict=True)]
    else:
        pairs = [_classes(a, b) for a, b in zip(reference, own, strict=True)]
    shared = [name for name in pairs[0] if all(name in pair for pair in pairs)]
    return {name: dataclasses.asdict(over_seeds(torch.stack([pair[name] for pair in pairs]))) for name in shared}


def over_seeds(each: Tensor) -> Difference:
    """The mean of differences, seeds × images, with its normal 95 % interval.

    Its variance is that of other images (of the mean over seeds) and, from two seeds on, that of other seeds (of the
    mean over images), added up.
    """
    seeds, count = each.shape
    each = each.double()
    variance = each.mean(dim=0).var().item() / count if count > 1 else 0.0
    if seeds > 1:
        variance += each.mean(dim=1).var().item() / seeds
    mean, half = each.mean().item(), _NORMAL_95 * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half)


def _classes(a: Outcomes, b: Outcomes) -> dict[str, Tensor]:
    where = {name: index for index, name in enumerate(b.names)}  # several processes have an order of their own
    if where.keys() != set(a.names):
        raise DtemError("these are not outcomes on the same images; evaluate both on the same data")
    at = torch.tensor([where[name] for name in a.names])
    return {"top1": 100 * (b.correct[at].double() - a.correct.double()), "loss": b.loss[at].double() - a.loss.double()}


def _captions(a: Any, b: Any) -> dict[str, Tensor]:
    if list(a.captions) != list(b.captions):
        raise DtemError("these are not captions of the same images; evaluate both on the same data")
    found = {"loss": torch.tensor(b.loss_by_image()) - torch.tensor(a.loss_by_image())}
    if a.scores is not None and b.scores is not None and "CIDEr" in a.scores.each and "CIDEr" in b.scores.each:
        found["CIDEr"] = torch.tensor(b.scores.each["CIDEr"]) - torch.tensor(a.scores.each["CIDEr"])
    return found


def verdict(differences: dict[str, dict[str, float]], metric: str, alike: bool) -> str:
    """Whether a claim shows, by the 95 % intervals of the main metric and, where that says nothing, of the loss."""
    found = {name: _side(name, value) for name, value in differences.items()}
    main = found.get(metric, 0)
    other = found.get("loss", 0) if metric != "loss" else 0
    if alike:
        return "no: they differ" if main or other else "no difference can be seen"
    if main:
        return "yes" if main > 0 else "no: the other way round"
    if other:
        return "in the loss only" if other > 0 else "no: the loss says the other way round"
    return "not clear"


def _side(name: str, difference: dict[str, float]) -> int:
    """1 where it is for the better by its interval, −1 for the worse, 0 where it may be either."""
    sign = -1 if name in SMALLER_IS_BETTER else 1
    low, high = sorted((sign * difference["low"], sign * difference["high"]))
    return 1 if low > 0 else -1 if high < 0 else 0
