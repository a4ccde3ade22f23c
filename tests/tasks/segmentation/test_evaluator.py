"""Whole images and windows; and an evaluation that was interrupted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtem.data.loader import Loader
from dtem.data.sources import Subset
from dtem.errors import DtemError
from dtem.tasks import running
from dtem.tasks.segmentation import evaluator
from dtem.tasks.segmentation.inference import Inference, predict
from dtem.tasks.segmentation.mask_datasets import Pairs, open_pairs
from dtem.tasks.segmentation.mask_transforms import eval_transform
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes
from tasks.segmentation.scenes import COLOURS, folder

CONFIG = {"input_size": (3, 32, 32), "mean": (0.0,) * 3, "std": (1.0,) * 3}


def by_colour(images: Tensor) -> Tensor:
    """A segmenter that needs no training: how near each pixel is to the colour of each class."""
    colours = torch.from_numpy(COLOURS[:3]).float() / 255
    return -((images.unsqueeze(1) - colours.view(1, 3, 3, 1, 1)) ** 2).sum(2)


def always_road(images: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(images[:, 0]), torch.ones_like(images[:, 0]), -images[:, 0].abs()], dim=1)


def pairs(tmp_path: Path) -> Pairs:
    return open_pairs(str(folder(tmp_path / "set")))


def run(
    source: Pairs, variants: dict, images: Subset | None = None, **options: object
) -> dict[str, SegmentationOutcomes]:
    loader = Loader(images or source, eval_transform(CONFIG, source.classes), 1, on_decode_error="stop")
    return evaluator.run_variants(variants, loader, 3, **options)


def test_a_perfect_one_and_a_lazy_one(tmp_path: Path) -> None:
    seen: list[int] = []
    outcomes = run(pairs(tmp_path), {"right": by_colour, "lazy": always_road}, progress=seen.append)
    assert sum(seen) == 6
    assert outcomes["right"].miou == pytest.approx(100.0)
    assert outcomes["lazy"].iou[0] == outcomes["lazy"].iou[2] == 0
    road, rest = outcomes["lazy"].target[:, 1].sum().item(), outcomes["lazy"].target.sum().item()
    assert outcomes["lazy"].iou[1].item() == pytest.approx(100 * road / rest)


@pytest.mark.parametrize(
    "inference",
    [Inference(window=(16, 16)), Inference(window=(16, 20), stride=(8, 7)), Inference(window=(64, 64)), Inference()],
)
def test_windows_cover_every_pixel_once_weighed(inference: Inference) -> None:
    """A model that looks at one pixel at a time says the same however the image is cut."""
    images = torch.rand(2, 3, 37, 45)
    torch.testing.assert_close(inference(by_colour, images), by_colour(images))


def test_windows_are_seen_alone() -> None:
    sizes = []

    def forward(images: Tensor) -> Tensor:
        sizes.append(tuple(images.shape[2:]))
        return images.mean((2, 3), keepdim=True).expand(-1, -1, *images.shape[2:])

    images = torch.rand(1, 2, 20, 30)
    logits = Inference(window=(20, 20), stride=(20, 10))(forward, images)
    assert sizes == [(20, 20)] * 2
    left, right = (images[..., part].mean((2, 3)) for part in (slice(0, 20), slice(10, 30)))
    torch.testing.assert_close(logits[..., 0, 0], left)
    torch.testing.assert_close(logits[..., 0, 29], right)
    torch.testing.assert_close(logits[..., 0, 15], (left + right) / 2)


def test_short_side_is_undone() -> None:
    sizes = []

    def forward(images: Tensor) -> Tensor:
        sizes.append(tuple(images.shape[2:]))
        return images

    images = torch.rand(1, 3, 24, 40)
    assert Inference(short_side=48)(forward, images).shape == images.shape
    assert sizes == [(48, 80)]
    assert predict(by_colour, images).shape == (1, 24, 40)


@pytest.mark.parametrize(
    "wrong", [{"stride": (4, 4)}, {"window": (0, 4)}, {"window": (4, 4), "stride": (5, 4)}, {"short_side": -1}]
)
def test_sizes_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(DtemError):
        Inference(**wrong)


def test_an_interrupted_evaluation_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(running, "SAVE_INTERVAL", -1.0)  # save after every image
    source, out = pairs(tmp_path), tmp_path / "out"
    out.mkdir()
    turns = []

    def fragile(images: Tensor) -> Tensor:
        turns.append(1)
        if len(turns) == 4:
            raise KeyboardInterrupt
        return by_colour(images)

    store = evaluator.OutcomeStore(out, "x", ["a", "b"])
    with pytest.raises(KeyboardInterrupt):
        run(source, {"a": fragile, "b": always_road}, save=store.save)
    again = evaluator.OutcomeStore(out, "x", ["a", "b"])
    assert again.done == {"a.png", "b.png", "c.png"}
    left = evaluator.remaining_images(source, again.done)
    assert left is not None
    stored = again.save(run(source, {"a": by_colour, "b": always_road}, left))
    uninterrupted = run(source, {"a": by_colour, "b": always_road})
    for name in uninterrupted:
        assert stored[name].names == uninterrupted[name].names
        assert torch.equal(stored[name].intersection, uninterrupted[name].intersection)
        assert torch.equal(stored[name].predicted, uninterrupted[name].predicted)
    done = evaluator.OutcomeStore(out, "x", ["a", "b"])
    assert evaluator.remaining_images(source, done.done) is None
    with pytest.raises(DtemError, match="evaluation of something else"):
        evaluator.OutcomeStore(out, "y", ["a", "b"])
    assert evaluator.OutcomeStore(out, "x", ["a", "b", "new"]).done == frozenset(), "a new variant has seen nothing yet"


def test_an_image_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    source = pairs(tmp_path)
    source.pairs[2][1].write_bytes(b"no picture")
    with pytest.raises(DtemError, match=r"c.png cannot be read"):
        run(source, {"a": by_colour})
