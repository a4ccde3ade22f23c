"""What a classifier said about each image, and how two of them are compared.

Two methods that run on the same images agree on most of them. What tells them apart are the images on which exactly
one is right, so they are compared image by image (*paired*): the interval of the difference is then several times
narrower than that of two accuracies held against each other.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from dtem.files import write_file
from dtem.types import DtemError

FORMAT = 1
KEPT = 5
"""Classes kept per image, best first."""
_KEY = "dtem-outcomes"
_TENSORS = {"labels": torch.int64, "predicted": torch.int64, "loss": torch.float32}
_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One model's answers, in the order in which the images came."""

    names: list[str]
    """Of the images, each once: by these, outcomes are paired."""
    labels: Int[Tensor, " n"]
    predicted: Int[Tensor, "n 5"]
    """The five likeliest classes, best first; -1 where the model has fewer."""
    loss: Float[Tensor, " n"]
    """Cross-entropy."""

    def __post_init__(self) -> None:
        n = len(self.names)
        shapes = {"labels": (n,), "predicted": (n, KEPT), "loss": (n,)}
        for field, shape in shapes.items():
            if (found := tuple(getattr(self, field).shape)) != shape:
                raise DtemError(f"outcomes of {n} images need {field} of shape {shape}, not {found}")
        if n == 0:
            raise DtemError("there are no outcomes: not one image was evaluated")
        if twice := repeated(self.names):
            raise DtemError(f"the image {twice!r} is there twice; outcomes are paired by name, so each needs its own")
        if not self.loss.isfinite().all():
            first = self.names[int((~self.loss.isfinite()).nonzero()[0])]
            raise DtemError(f"the cross-entropy of {first!r} is not finite: the model's output is NaN or infinite")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def correct(self) -> Tensor:
        """Whether the likeliest class is the right one, image by image."""
        return self.predicted[:, 0] == self.labels

    @property
    def top1(self) -> float:
        """Accuracy, in percent."""
        return 100 * self.correct.double().mean().item()

    @property
    def top5(self) -> float:
        """How often the right class is among the five likeliest, in percent."""
        return 100 * (self.predicted == self.labels[:, None]).any(1).double().mean().item()

    @property
    def mean_loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss.double().mean().item()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; an older one there is replaced whole, or kept."""
        tensors = {name: getattr(self, name).detach().cpu().to(dtype).contiguous() for name, dtype in _TENSORS.items()}
        header = json.dumps({"format": FORMAT, "names": self.names})
        write_file(path, to_bytes(tensors, {_KEY: header}))

    @classmethod
    def load(cls, path: str | Path) -> "Outcomes":
        """Read what `save` wrote; a file that is damaged or something else is refused by name."""
        try:
            names, tensors = read_tensors(Path(path), _KEY, _TENSORS)
            return cls(names, **tensors)
        except DtemError as error:
            raise DtemError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Difference:
    """A mean difference with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """How b differs from a, on the images that both have seen."""

    n: int
    top1: Difference
    """Top-1 of b minus that of a, in points."""
    only_a: int
    """Images that a alone has right."""
    only_b: int
    p: float
    """McNemar's exact test, two-sided: how likely such unequal counts are if both were equally good."""
    loss: Difference
    """Mean cross-entropy of b minus that of a: below zero, b is better."""


def paired(a: Outcomes, b: Outcomes) -> Paired:
    """Compare image by image, on the images that are in both.

    The intervals take the mean of the differences per image as normal, which hundreds of images make it (on few
    discordant ones trust `p`, which is exact). A bootstrap gives the same ones, see the tests.
    """
    where = {name: index for index, name in enumerate(b.names)}
    both = [(index, where[name]) for index, name in enumerate(a.names) if name in where]
    if len(both) < 2:
        raise DtemError(
            f"{len(both)} of the images are in both outcomes ({a.names[0]!r}, … and {b.names[0]!r}, …); a comparison "
            "needs two or more: evaluate both on the same data"
        )
    ours, theirs = torch.tensor(both).T
    unlike = (a.labels[ours] != b.labels[theirs]).nonzero()
    if len(unlike):
        i, j = both[int(unlike[0])]
        raise DtemError(
            f"the image {a.names[i]!r} has label {int(a.labels[i])} in one and {int(b.labels[j])} in the other: "
            "these are not outcomes on the same data"
        )
    right_a, right_b = a.correct[ours], b.correct[theirs]
    only_a, only_b = int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    return Paired(
        n=len(both),
        top1=difference(100 * (right_b.double() - right_a.double())),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar(only_a, only_b),
        loss=difference(b.loss[theirs].double() - a.loss[ours].double()),
    )


def difference(each: Float[Tensor, " n"]) -> Difference:
    """The mean of differences per image with its normal 95 % interval."""
    mean = each.mean().item()
    half = _NORMAL_95 * each.std().item() / math.sqrt(len(each))
    return Difference(mean, mean - half, mean + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p: twice the tail of a fair coin, thrown once per discordant image. Whole numbers throughout."""
    n = only_a + only_b
    tail = term = 1
    for k in range(min(only_a, only_b)):
        term = term * (n - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)


def pool(parts: Sequence[Outcomes]) -> Outcomes:
    """Outcomes on disjoint parts of the data as one: the folds of cross-fitting, the shares of several processes."""
    if not parts:
        raise DtemError("there are no outcomes to pool")
    names = [name for part in parts for name in part.names]
    if twice := repeated(names):
        raise DtemError(f"the image {twice!r} is in more than one part: only outcomes on disjoint images are pooled")
    return Outcomes(
        names,
        torch.cat([part.labels for part in parts]),
        torch.cat([part.predicted for part in parts]),
        torch.cat([part.loss for part in parts]),
    )


def repeated(names: Sequence[str]) -> str | None:
    """The first name that is there for the second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_tensors(path: Path, key: str, expected: Mapping[str, torch.dtype]) -> tuple[list[str], dict[str, Tensor]]:
    """Names of images, and what is kept of each, from a file with the header `key`."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(key, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise DtemError(f"this is not a whole safetensors file ({error})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DtemError(f"the file cannot be read: {error}") from error
    if not isinstance(header, dict) or "format" not in header:
        raise DtemError("these are no outcomes; `dtem eval --out` writes some")
    if header["format"] != FORMAT:
        raise DtemError(f"these are outcomes of format {header['format']!r}; this version reads format {FORMAT}")
    names = header.get("names")
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or found != expected:
        raise DtemError(f"the outcomes are damaged: they hold {', '.join(sorted(found)) or 'nothing'}")
    return names, tensors
