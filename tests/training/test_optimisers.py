"""Learning rate and parameter groups."""

import math

import pytest
import torch
from torch import nn

from dtem.training.optimisers import learning_rate, parameter_groups


def test_the_rate_falls_as_a_cosine() -> None:
    rates = [learning_rate(update, 10, 1e-3, 1e-6) for update in range(11)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[5] == pytest.approx((1e-3 + 1e-6) / 2)
    assert rates[10] == pytest.approx(1e-6)
    assert rates == sorted(rates, reverse=True)


def test_it_rises_first_where_asked_to_and_never_ends_above_its_peak() -> None:
    assert learning_rate(0, 100, 1.0, 0.0, warmup=4) == pytest.approx(0.25)
    assert learning_rate(4, 100, 1.0, 0.0, warmup=4) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.04)))
    assert learning_rate(9, 10, 1e-7, 1e-6) == pytest.approx(1e-7)


def test_only_matrices_decay() -> None:
    matrices, vectors = parameter_groups(nn.Linear(3, 2).parameters(), 0.1)
    assert [tuple(p.shape) for p in matrices["params"]] == [(2, 3)]  # type: ignore[attr-defined]
    assert [tuple(p.shape) for p in vectors["params"]] == [(2,)]  # type: ignore[attr-defined]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    torch.optim.AdamW([matrices, vectors])
