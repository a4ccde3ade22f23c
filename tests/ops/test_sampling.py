"""Inverse-transform sampling at its edges; `tests/methods/test_ats.py` has it against loops."""

import pytest
import torch

from dtem import ops
from dtem.errors import DtemError


@pytest.mark.parametrize("ascending", [True, False])
def test_equal_scores_and_as_many_samples_keep_all(ascending):
    index, real = ops.sample(torch.ones(2, 10), 10, ascending)
    assert index.tolist() == [list(range(10))] * 2
    assert real.all()


@pytest.mark.parametrize("ascending", [True, False])
def test_what_has_no_score_is_never_drawn(ascending):
    score = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]])
    for samples in (1, 2, 5, 7, 50):
        index, real = ops.sample(score, samples, ascending)
        assert index.shape == (1, min(samples, 7))
        assert set(index[real].tolist()) <= {1, 4}
        assert real.sum() == min(samples, 2)
        assert (index[~real] == index[0, 0]).all(), "padding repeats the first token"
        assert real[0].tolist() == sorted(real[0].tolist(), reverse=True), "padding comes last"


def test_one_token_may_take_it_all():
    score = torch.full((1, 6), 1e-6)
    score[0, 3] = 1.0
    index, real = ops.sample(score, 4)
    assert index[real].tolist() == [3]


def test_a_large_share_is_always_drawn():
    score = torch.rand(4, 50, dtype=torch.float64) ** 4
    share = score / score.sum(dim=1, keepdim=True)
    index, real = ops.sample(score, 30)
    for row in range(4):
        drawn = set(index[row][real[row]].tolist())
        assert {i for i in range(50) if share[row, i] >= 1 / 30} <= drawn
        assert len(drawn) < 30


def test_no_samples_are_refused():
    with pytest.raises(DtemError, match="0 samples"):
        ops.sample(torch.ones(1, 3), 0)
