"""Statistics: a mean difference with its 95 % interval, an interval of a share, a bootstrap, McNemar's test."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Difference:
    """A mean difference with its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """``+0.42 (+0.10 … +0.74)``."""
        return f"{self.value:+.{digits}f} ({self.low:+.{digits}f} … {self.high:+.{digits}f})"


def mean_difference(differences: Float[Tensor, " n"]) -> Difference:
    """The mean of paired differences with its normal 95 % interval."""
    mean = differences.mean().item()
    half = _NORMAL_95 * differences.std().item() / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def share_interval(percent: float, count: int) -> tuple[float, float]:
    """95 % interval of a share in percent that was counted on `count` independent images (Wilson's)."""
    share, z = percent / 100, _NORMAL_95
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * (middle - half), 100 * (middle + half)


def bootstrap(a: Sequence[float], b: Sequence[float], draws: int = 10_000, seed: int = 0) -> Difference:
    """Paired bootstrap of the mean of b − a: every draw takes the same images for both."""
    differences = np.asarray(b, dtype=float) - np.asarray(a, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(differences), size=(draws, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return Difference(float(differences.mean()), float(low), float(high))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p of McNemar's exact test, from the numbers of images that a alone and b alone has right."""
    if only_a + only_b == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(min(only_a, only_b), only_a + only_b).pvalue)
