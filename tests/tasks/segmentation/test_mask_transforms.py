"""What training sees of an image and its mask: always the same part of both."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dtem.data.loader import Loader
from dtem.errors import DtemError
from dtem.tasks.segmentation.crop_config import CropConfig
from dtem.tasks.segmentation.mask_datasets import Pair, open_pairs
from dtem.tasks.segmentation.mask_transforms import eval_transform, split, train_transform
from tasks.segmentation.scenes import COLOURS, folder, scene

CONFIG = {"input_size": (3, 24, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.5)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return folder(tmp_path / "set")


def test_evaluation_takes_the_image_as_it_is(root: Path) -> None:
    source = open_pairs(str(root))
    pair = source.read(1).image
    pair.load()
    images, mask = split(eval_transform(CONFIG, source.classes)(pair)[None])
    pixels, truth = scene(1)
    expected = (torch.from_numpy(pixels).movedim(-1, 0) / 255 - torch.tensor(CONFIG["mean"]).view(3, 1, 1)) / (
        torch.tensor(CONFIG["std"]).view(3, 1, 1)
    )
    torch.testing.assert_close(images[0], expected)
    assert torch.equal(mask[0], torch.from_numpy(np.where(truth == 3, -1, truth.astype(int))))


def test_image_and_mask_go_together(root: Path) -> None:
    """Classes are told by the colour: after any resize, crop and flip, colours and classes still agree."""
    source = open_pairs(str(root))
    plain = {**CONFIG, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    transform = train_transform(plain, CropConfig(photometric=False), True, source.classes)
    loader = Loader(source, transform, 3, seed=1, shuffle=True)
    agreed, scales = [], set()
    for batch in loader.epoch(0):
        images, masks = split(batch.images)
        assert images.shape[2:] == masks.shape[1:] == (24, 32)
        distance = torch.cdist((255 * images).movedim(1, -1).reshape(-1, 3), torch.from_numpy(COLOURS[:3]).float())
        nearest, truth = distance.argmin(1), masks.reshape(-1)
        here = (truth >= 0) & (images.movedim(1, -1).reshape(-1, 3).sum(1) > 0)
        agreed.append((nearest == truth)[here].float().mean().item())
        scales |= {int((mask == 2).sum()) for mask in masks}
    assert min(agreed) > 0.85  # resizing blurs borders
    assert len(scales) > 3, "of different sizes"


def test_padding_has_no_class(root: Path) -> None:
    source = open_pairs(str(root))
    config = {**CONFIG, "input_size": (3, 64, 64)}
    transform = train_transform(config, CropConfig(scales=(1.0, 1.0), photometric=False), False, source.classes)
    pair = source.read(0).image
    pair.load()
    _, mask = split(transform(pair)[None])
    assert int((mask >= 0).sum()) == 32 * 46, "all of the image, and nothing else"


def test_short_side(root: Path) -> None:
    source = open_pairs(str(root))
    config = {**CONFIG, "input_size": (3, 16, 24)}
    transform = train_transform(
        config, CropConfig(short_side=16, scales=(1.0, 1.0), photometric=False), False, source.classes
    )
    pair = source.read(0).image
    pair.load()
    joined = transform(pair)
    assert joined.shape == (4, 16, 24)
    assert (joined[3, 2:6, 12] == 0).all()
    assert (joined[3, 15, 4:] == 1).all(), "the whole scene, half as large"


def test_the_same_in_every_run_and_with_workers(root: Path) -> None:
    source = open_pairs(str(root))
    transform = train_transform(CONFIG, CropConfig(), True, source.classes)

    def batches(workers: int, seed: int = 3) -> list[torch.Tensor]:
        loader = Loader(source, transform, 3, seed=seed, shuffle=True, workers=workers)
        return [batch.images for batch in loader.epoch(2)]

    first = batches(0)
    assert all(torch.equal(a, b) for a, b in zip(first, batches(1), strict=True))
    assert not torch.equal(first[0], batches(0, seed=4)[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_does_not_fit_is_named(root: Path, workers: int) -> None:
    Image.fromarray(np.zeros((10, 10), np.uint8)).save(root / "masks" / "b.png")
    source = open_pairs(str(root))
    loader = Loader(source, eval_transform(CONFIG, source.classes), 1, workers=workers)
    with pytest.raises(
        DtemError, match=r"^the image b.png is 48×32 and its mask b.png 10×10: they must be of one size$"
    ):
        list(loader.epoch(0))
    Image.fromarray(np.full((32, 48), 9, np.uint8)).save(root / "masks" / "b.png")
    with pytest.raises(DtemError, match=r"^the mask b.png has the value 9"):
        list(loader.epoch(0))


def test_unreadable_files_are_unreadable(root: Path) -> None:
    (root / "masks" / "a.png").write_bytes(b"no picture")
    pair = Pair(root / "images" / "a.png", root / "masks" / "a.png")
    with pytest.raises(OSError):
        pair.load()


@pytest.mark.parametrize("wrong", [{"short_side": -1}, {"scales": (0.0, 1.0)}, {"scales": (2.0, 1.0)}])
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(DtemError, match=next(iter(wrong))):
        CropConfig(**wrong)
