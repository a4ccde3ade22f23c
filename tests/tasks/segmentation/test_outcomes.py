"""Mean IoU against torchmetrics and loops; the bootstrap against one written as a loop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from dtem.errors import DtemError
from dtem.tasks.outcome_files import pool
from dtem.tasks.segmentation.loss import distill_loss, task_loss
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes, count_pixels, paired

K = 5


def random(
    images: int = 6, wrong: float = 0.3, seed: int = 0
) -> tuple[SegmentationOutcomes, torch.Tensor, torch.Tensor]:
    """Class 4 is nowhere; some pixels have no class."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(-1, 4, (images, 12, 15), generator=generator)
    off = torch.rand(truth.shape, generator=generator) < wrong
    predicted = torch.where(off, torch.randint(0, 4, truth.shape, generator=generator), truth.clamp(min=0))
    parts = [count_pixels(one, mask, K) for one, mask in zip(predicted, truth, strict=True)]
    names = [f"{index}.png" for index in range(images)]
    return SegmentationOutcomes(names, *map(torch.stack, zip(*parts, strict=True))), predicted, truth


def test_counts_by_hand() -> None:
    classes = torch.tensor([[0, 1, 1], [2, 2, 0]])
    truth = torch.tensor([[0, 1, 0], [2, -1, -1]])
    hit, predicted, real = count_pixels(classes, truth, 4)
    assert hit.tolist() == [1, 1, 1, 0]
    assert predicted.tolist() == [1, 2, 1, 0], "only where there is a class"
    assert real.tolist() == [2, 1, 1, 0]
    areas = SegmentationOutcomes(["x"], hit[None], predicted[None], real[None])
    assert areas.iou[:3].tolist() == pytest.approx([50.0, 50.0, 100.0])
    assert areas.iou[3].isnan()
    assert areas.miou == pytest.approx(200 / 3)
    assert areas.accuracy == pytest.approx(75.0)
    assert areas.class_accuracy == pytest.approx(100 * (0.5 + 1 + 1) / 3)


def test_against_torchmetrics() -> None:
    areas, predicted, truth = random()
    jaccard = MulticlassJaccardIndex(K, ignore_index=-1, average="macro")
    by_class = MulticlassJaccardIndex(K, ignore_index=-1, average="none")
    right = MulticlassAccuracy(K, ignore_index=-1, average="micro")
    for one, mask in zip(predicted, truth, strict=True):
        for metric in (jaccard, by_class, right):
            metric.update(one[None], mask[None])
    assert areas.miou == pytest.approx(100 * jaccard.compute().item(), rel=1e-5)
    torch.testing.assert_close(areas.iou[:4], 100 * by_class.compute()[:4].double(), rtol=1e-5, atol=1e-5)
    assert areas.accuracy == pytest.approx(100 * right.compute().item(), rel=1e-5)


def test_bootstrap_by_a_loop() -> None:
    first, second = random(12, 0.4)[0], random(12, 0.2)[0]
    differences = paired(first, second, draws=4000, seed=3)
    assert differences.value == pytest.approx(second.miou - first.miou)
    assert differences.low < differences.value < differences.high

    def miou(areas: SegmentationOutcomes, drawn: np.ndarray) -> float:
        hit, predicted, truth = (
            part.numpy()[drawn].sum(0) for part in (areas.intersection, areas.predicted, areas.target)
        )
        union = predicted + truth - hit
        return 100 * float(np.mean(hit[union > 0] / union[union > 0]))

    draws = np.random.default_rng(0).integers(0, 12, (4000, 12))
    low, high = np.percentile([miou(second, d) - miou(first, d) for d in draws], [2.5, 97.5])
    assert differences.low == pytest.approx(low, abs=0.4)
    assert differences.high == pytest.approx(high, abs=0.4)


def test_bootstrap_of_several_runs_is_of_their_mean() -> None:
    base, better = random(8, 0.5)[0], random(8, 0.1)[0]
    same = paired(base, base)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    both = paired([base], [base, better])
    assert both.value == pytest.approx((better.miou - base.miou) / 2)


def test_outcomes_of_other_images_are_not_compared() -> None:
    areas, *_ = random()
    other = SegmentationOutcomes(
        [f"x{name}" for name in areas.names], areas.intersection, areas.predicted, areas.target
    )
    with pytest.raises(DtemError, match="not outcomes on the same images"):
        paired(areas, other)


def test_files(tmp_path: Path) -> None:
    areas, *_ = random()
    areas.save(tmp_path / "a.safetensors", "a model")
    again = SegmentationOutcomes.load(tmp_path / "a.safetensors")
    assert again.names == areas.names
    assert torch.equal(again.intersection, areas.intersection)
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    with pytest.raises(DtemError, match="not a complete safetensors file"):
        SegmentationOutcomes.load(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(json.dumps({}).encode())
    with pytest.raises(DtemError, match=r"b.safetensors"):
        SegmentationOutcomes.load(tmp_path / "b.safetensors")


def test_joining() -> None:
    areas, *_ = random()
    parts = [
        SegmentationOutcomes([name], *(p[i : i + 1] for p in (areas.intersection, areas.predicted, areas.target)))
        for i, name in enumerate(areas.names)
    ]
    assert pool(parts).miou == areas.miou
    with pytest.raises(DtemError, match="occurs more than once"):
        pool([areas, areas])


def test_losses_are_means_over_pixels() -> None:
    logits, target = torch.randn(2, 3, 4, 5), torch.randint(-1, 3, (2, 4, 5))
    total, pixels = 0.0, 0
    for b, y, x in np.ndindex(2, 4, 5):
        if target[b, y, x] >= 0:
            total -= logits[b, :, y, x].log_softmax(0)[target[b, y, x]].item()
            pixels += 1
    assert task_loss(logits, target).item() == pytest.approx(total / pixels, rel=1e-5)
    assert task_loss(logits, torch.full_like(target, -1)).item() == 0
    teacher = torch.randn(2, 3, 4, 5)
    p, q = teacher.softmax(1), logits.softmax(1)
    expected = (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(distill_loss(logits, teacher), expected)
    assert distill_loss(logits, logits).item() == pytest.approx(0, abs=1e-6)
