"""Features judged by nearest neighbours, and learned without labels."""

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity

from dtem.tasks.classification import nearest
from dtem.tasks.classification.loss import feature_loss


def test_votes_by_hand():
    queries, bank = torch.randn(4, 6), torch.randn(9, 6)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 4])
    found = nearest.vote(queries, bank, labels, classes=5, k=3)
    for query, row in zip(queries, found, strict=True):
        cosines = [float(cosine_similarity(query, one, dim=0)) for one in bank]
        best = sorted(range(9), key=lambda index: -cosines[index])[:3]
        weights = [math.exp(cosines[index] / nearest.TEMPERATURE) for index in best]
        shares = [0.0] * 5
        for index, weight in zip(best, weights, strict=True):
            shares[int(labels[index])] += weight / sum(weights)
        expected = [math.log((1 - nearest.UNSURE) * share + nearest.UNSURE / 5) for share in shares]
        assert row.tolist() == pytest.approx(expected, abs=1e-4)
        assert row.exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_features_that_point_the_same_way_are_no_loss():
    features = torch.randn(5, 7)
    assert float(feature_loss(3 * features, features)) == pytest.approx(0.0, abs=1e-6)
    assert float(feature_loss(-features, features)) == pytest.approx(2.0, abs=1e-6)
    one = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    other = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert float(feature_loss(one, other)) == pytest.approx(1 - (0 + math.sqrt(0.5)) / 2, abs=1e-6)
