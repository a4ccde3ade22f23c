"""Kendall's τ against counting pairs, and of embeddings that start from the keys."""

import torch

import dtem
from benchmarks.reproduce.kendall import correlations, kendall
from dtem.models import digits_vit


def test_tau_counts_concordant_pairs():
    a, b = torch.randn(3, 20), torch.randn(3, 20)
    signs = torch.sign(a[:, :, None] - a[:, None, :]) * torch.sign(b[:, :, None] - b[:, None, :])
    assert torch.allclose(kendall(a, b), signs.sum(dim=(1, 2)).double() / (20 * 19))
    assert torch.allclose(kendall(a, 3 * a + 1), torch.ones(3).double())
    assert torch.allclose(kendall(a, -a), -torch.ones(3).double())


def test_ties_are_broken_by_index():
    a, b = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    broken = kendall(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[3.0, 1.0, 2.0, 0.0]]))
    assert torch.equal(kendall(a, b), broken)


def test_embeddings_that_start_from_the_keys_rank_as_the_keys_do():
    host, images = digits_vit.create(), torch.randn(1, 1, 56, 56)
    same = correlations(host, dtem.patch(digits_vit.create(), "dtem"), images)
    other = correlations(host, dtem.patch(digits_vit.create(), "dtem", init="random"), images)
    assert same.shape == (1, 12)
    assert same.min() > 0.999
    assert other.max() < 0.95
