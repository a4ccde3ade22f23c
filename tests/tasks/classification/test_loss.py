"""Losses against their definitions, written out."""

import math

import pytest
import torch

from dtem.tasks.classification.loss import distill_loss, feature_loss, task_loss


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_labels_and_rows_of_probabilities_agree(logits: torch.Tensor) -> None:
    labels = torch.tensor([0, 3, 4, 3])
    expected = -logits.softmax(1)[range(4), labels].log().mean()
    torch.testing.assert_close(task_loss(logits, labels), expected)
    torch.testing.assert_close(task_loss(logits, torch.eye(5, dtype=torch.float64)[labels]), expected)


def test_smoothing_spreads_the_label(logits: torch.Tensor) -> None:
    labels = torch.tensor([0, 3, 4, 3])
    rows = 0.9 * torch.eye(5, dtype=torch.float64)[labels] + 0.1 / 5
    torch.testing.assert_close(task_loss(logits, labels, 0.1), task_loss(logits, rows))


def test_an_image_without_a_label_adds_nothing(logits: torch.Tensor) -> None:
    labels = torch.tensor([0, -1, 4, -1])
    torch.testing.assert_close(task_loss(logits, labels), task_loss(logits[::2], labels[::2]))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_a_divergence(logits: torch.Tensor, temperature: float) -> None:
    teacher = logits.flip(0)
    p, q = ((part / temperature).softmax(1) for part in (teacher, logits))
    expected = (p * (p / q).log()).sum(1).mean() * temperature**2
    torch.testing.assert_close(distill_loss(logits, teacher, temperature), expected)
    assert distill_loss(logits, logits, temperature).abs() < 1e-12


def test_features_that_point_the_same_way_are_no_loss():
    features = torch.randn(5, 7)
    assert float(feature_loss(3 * features, features)) == pytest.approx(0.0, abs=1e-6)
    assert float(feature_loss(-features, features)) == pytest.approx(2.0, abs=1e-6)
    one = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    other = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert float(feature_loss(one, other)) == pytest.approx(1 - (0 + math.sqrt(0.5)) / 2, abs=1e-6)
