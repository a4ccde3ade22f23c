"""Kendall's τ against counting pairs, and what it says of embeddings that are the keys."""

import torch

import dtem
from dtem.reproduce.kendall import correlations, inversions, kendall
from dtem.tasks.classification import digits


def test_inversions_are_those_that_are_counted():
    for n in (1, 2, 3, 8, 13):
        order = torch.stack([torch.randperm(n) for _ in range(4)])
        pairs = [(row[:, None] > row[None, :]).triu(1).sum() for row in order]
        assert inversions(order).tolist() == [int(count) for count in pairs]


def test_tau_is_what_pairs_say():
    a, b = torch.randn(3, 20), torch.randn(3, 20)
    signs = torch.sign(a[:, :, None] - a[:, None, :]) * torch.sign(b[:, :, None] - b[:, None, :])
    assert torch.allclose(kendall(a, b), signs.sum(dim=(1, 2)).double() / (20 * 19))
    assert torch.allclose(kendall(a, 3 * a + 1), torch.ones(3).double())
    assert torch.allclose(kendall(a, -a), -torch.ones(3).double())


def test_embeddings_that_start_from_the_keys_order_as_the_keys_do():
    host, images = digits.host(), torch.randn(1, 1, 28, 28)
    same = correlations(host, dtem.patch(digits.host(), "dtem"), images)
    other = correlations(host, dtem.patch(digits.host(), "dtem", init="random"), images)
    assert same.shape == (1, 12)
    assert same.min() > 0.999
    assert other.max() < 0.95
