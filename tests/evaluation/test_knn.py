"""Votes of nearest neighbours."""

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity

from dtem.evaluation import knn


def test_votes_by_hand():
    queries, bank = torch.randn(4, 6), torch.randn(9, 6)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 4])
    votes = knn.vote(queries, bank, labels, classes=5, k=3)
    for query, row in zip(queries, votes, strict=True):
        cosines = [float(cosine_similarity(query, one, dim=0)) for one in bank]
        best = sorted(range(9), key=lambda index: -cosines[index])[:3]
        weights = [math.exp(cosines[index] / knn.TEMPERATURE) for index in best]
        shares = [0.0] * 5
        for index, weight in zip(best, weights, strict=True):
            shares[int(labels[index])] += weight / sum(weights)
        expected = [math.log((1 - knn.SMOOTHING) * share + knn.SMOOTHING / 5) for share in shares]
        assert row.tolist() == pytest.approx(expected, abs=1e-4)
        assert row.exp().sum() == pytest.approx(1.0, abs=1e-5)
