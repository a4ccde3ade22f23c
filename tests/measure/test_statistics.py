"""Paired statistics against enumeration, simulation and theory."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dtem.measure.statistics import Difference, bootstrap, mcnemar, mean_difference, share_interval


def test_the_interval_covers_the_true_difference_19_times_of_20() -> None:
    generator = torch.Generator().manual_seed(0)
    # discordant with probability 0.06 and 0.04 either way: the true difference is 2 points
    draw = torch.rand(2000, 500, generator=generator, dtype=torch.float64)
    each = 100 * ((draw < 0.06).double() - (draw > 0.96).double())
    inside = [found.low <= 2 <= found.high for found in map(mean_difference, each)]
    assert 0.93 < sum(inside) / len(inside) < 0.97


def enumerated(only_a: int, only_b: int) -> Fraction:
    """Exact two-sided p by looking at every sequence of throws."""
    n = only_a + only_b
    extreme = [heads for heads in map(int.bit_count, range(2**n)) if abs(2 * heads - n) >= abs(only_a - only_b)]
    return Fraction(len(extreme), 2**n)


@pytest.mark.parametrize("pair", [(10, 2), (2, 10), (0, 0), (0, 1), (3, 3), (5, 0), (7, 6)])
def test_mcnemar_against_all_throws(pair: tuple[int, int]) -> None:
    assert mcnemar(*pair) == pytest.approx(float(enumerated(*pair)), rel=1e-12)


def test_mcnemar_known_numbers() -> None:
    assert mcnemar(10, 2) == mcnemar(2, 10) == 158 / 4096
    assert mcnemar(0, 5) == 0.0625
    # large counts: the normal approximation with continuity correction, z = (|b - c| - 1) / sqrt(b + c)
    assert mcnemar(5200, 4900) == pytest.approx(math.erfc(299 / math.sqrt(10100) / math.sqrt(2)), rel=1e-3)
    assert mcnemar(3000, 0) == 0  # below what a float can hold, and no error


def test_the_bootstrap_knows_what_noise_is():
    generator = np.random.default_rng(0)
    a = generator.normal(size=400)
    better = bootstrap(a, a + 0.5 + 0.1 * generator.normal(size=400))
    assert better.low < better.value < better.high
    assert better.low > 0.45
    half = 1.96 * np.std(a) / 20
    alike = bootstrap(np.zeros(400), a)
    assert alike.high - alike.low == pytest.approx(2 * half, rel=0.1)


def test_text() -> None:
    assert Difference(0.5, -0.25, 1.0).text() == "+0.50 (-0.25 … +1.00)"
    assert Difference(0.5, -0.25, 1.0).text(1) == "+0.5 (-0.2 … +1.0)"


def test_the_interval_of_a_share() -> None:
    low, high = share_interval(90.0, 100)
    assert (round(low, 2), round(high, 2)) == (82.56, 94.48)  # Wilson's, as R's prop.test without correction gives it
    assert share_interval(100.0, 50)[1] == pytest.approx(100)
    assert share_interval(0.0, 50)[0] == pytest.approx(0)
