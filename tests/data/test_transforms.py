import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtem.data.augmentation import Augmentation
from dtem.data.loader import Loader
from dtem.data.sources import open_source
from dtem.data.transforms import create_mixup, eval_transform, mix, posterize, seeded, to_mode, train_transform
from dtem.errors import DtemError

CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 0.9,
    "crop_mode": "center",
}
PLAIN = Augmentation(crop="none", flip=False, auto="", erasing=0, mixup=0, cutmix=0)


def noise(size: int = 40, mode: str = "RGB") -> Image.Image:
    shape = (size, size) if mode == "L" else (size, size, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def test_evaluation_is_timms_own_crop_for_deit() -> None:
    import timm
    from timm.data import resolve_data_config

    config = resolve_data_config(model=timm.create_model("deit_tiny_patch16_224", depth=1))
    transformed = eval_transform(config)(noise(248))
    pixels = np.asarray(noise(248))[12:-12, 12:-12]  # 248 is resized to 248, then 224 from the middle
    mean, std = (torch.tensor(config[key]).reshape(3, 1, 1) for key in ("mean", "std"))
    expected = (torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255 - mean) / std
    assert config["mean"] == (0.485, 0.456, 0.406)
    assert torch.allclose(transformed, expected)


def test_training_without_augmentation_is_evaluation() -> None:
    image = noise(50)
    assert torch.equal(train_transform(CONFIG, PLAIN)(image), eval_transform(CONFIG)(image))


@pytest.mark.parametrize(
    "changes",
    [{"crop": "deit"}, {"crop": "mild"}, {"flip": True}, {"auto": "rand-m9-mstd0.5-inc1"}, {"erasing": 1.0}],
    ids=str,
)
def test_each_part_of_the_recipe_does_something(changes: dict[str, Any]) -> None:
    transform = train_transform(CONFIG, Augmentation(**{**vars(PLAIN), **changes}))
    plain = eval_transform(CONFIG)(noise())
    with seeded(0):
        views = [transform(noise()) for _ in range(8)]
    assert all(view.shape == (3, 32, 32) and view.dtype == torch.float32 for view in views)
    assert any(not torch.equal(view, plain) for view in views)
    with seeded(0):
        assert all(torch.equal(view, transform(noise())) for view in views)


def test_colour_changes() -> None:
    transform = train_transform(CONFIG, Augmentation(**{**vars(PLAIN), "jitter": 0.4}))
    with seeded(0):
        assert not torch.equal(transform(noise()), eval_transform(CONFIG)(noise()))


@pytest.mark.parametrize(
    ("augmentation", "scale"),
    [
        (Augmentation(), (0.08, 1.0)),
        (Augmentation(crop="mild"), (0.6, 1.0)),
        (Augmentation(crop="mild", scale=(0.3, 0.4)), (0.3, 0.4)),
    ],
)
def test_scale_of_the_random_crop(augmentation: Augmentation, scale: tuple[float, float]) -> None:
    transform: Any = train_transform(CONFIG, augmentation)
    assert transform.steps[0].scale == scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": "wild"}, "crop = 'wild' must be one of deit, mild, none"),
        ({"scale": (0.5, 0.2)}, "scale = "),
        ({"scale": (0.0, 1.0)}, "scale = "),
        ({"crop": "none", "scale": (0.5, 1.0)}, "needs a random crop"),
        ({"auto": "magic"}, "auto = 'magic'"),
        ({"erasing": 1.5}, "erasing = 1.5"),
        ({"mixup": -1.0}, "mixup = -1.0"),
        ({"cutmix": float("nan")}, "cutmix = nan"),
        ({"jitter": 0.4}, "jitter = 0.4 has no effect together with auto"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        Augmentation(**changes)


def test_a_policy_that_timm_does_not_know() -> None:
    with pytest.raises(DtemError, match="timm cannot build auto = 'rand-x9'"):
        train_transform(CONFIG, Augmentation(auto="rand-x9"))


@pytest.mark.parametrize("auto", ["rand-m10-n3-inc1", "rand-m0-n3", "augmix-m10", "v0"])
def test_the_strongest_augmentation_runs(auto: str) -> None:
    transform = train_transform(CONFIG, Augmentation(**{**vars(PLAIN), "auto": auto}))
    for number in range(40):
        with seeded(number):
            assert transform(noise()).isfinite().all()


def test_posterising() -> None:
    image = Image.fromarray(np.array([[0, 100, 200, 255]], dtype=np.uint8))
    values = {bits: np.asarray(posterize(image, bits)).tolist()[0] for bits in (9, 8, 1, 0, -2)}
    assert values[9] == values[8] == [0, 100, 200, 255]
    assert values[1] == [0, 0, 128, 128]
    assert values[0] == values[-2] == [0, 0, 0, 0]


def test_channels() -> None:
    grey = {**CONFIG, "input_size": (1, 32, 32), "mean": (0.5,), "std": (0.5,)}
    assert eval_transform(grey)(noise()).shape == (1, 32, 32)
    assert train_transform(grey, Augmentation(auto=""))(noise()).shape == (1, 32, 32)
    with pytest.raises(DtemError, match="1 or 3 channels, not 4"):
        eval_transform({**CONFIG, "input_size": (4, 32, 32)})


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I", "F"])
def test_images_of_every_kind_become_rgb(mode: str) -> None:
    image = noise(mode="L").convert(mode)
    assert eval_transform(CONFIG)(image).shape == (3, 32, 32)


def test_sixteen_bits_of_grey_are_scaled_not_cut() -> None:
    deep = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16))
    assert np.asarray(to_mode(deep, "L")).tolist() == [[0, 128, 255]]
    shallow = Image.fromarray(np.array([[0, 128, 255]], dtype=np.int32))
    assert np.asarray(to_mode(shallow, "L")).tolist() == [[0, 128, 255]]


def test_a_transparent_palette_needs_no_warning() -> None:
    buffer = io.BytesIO()
    noise().convert("P").save(buffer, "PNG", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_mode(Image.open(buffer), "RGB").mode == "RGB"


def test_transforms_can_be_sent_to_a_fresh_process() -> None:
    transform = train_transform(CONFIG, Augmentation())
    copy = pickle.loads(pickle.dumps(transform))
    for number in range(4):
        with seeded(number):
            one = transform(noise())
        with seeded(number):
            assert torch.equal(copy(noise()), one)


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeded_gives_the_generators_back() -> None:
    np.random.seed(0)
    with seeded(1, 2):
        inside = draw()
    after = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert draw() == after
    with seeded(1, 2):
        assert draw() == inside
    with seeded(1, 3):
        assert draw() != inside
    with pytest.raises(KeyError), seeded(4):
        raise KeyError
    following = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draw()
    assert draw() == following


def test_mixing_depends_on_its_seed_alone() -> None:
    mixup = create_mixup(Augmentation(), num_classes=5, smoothing=0.1)
    images, labels = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    original = images.clone()
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    results = [mix(mixup, images, labels, seed) for seed in (1, 1, 2)]
    assert np.random.rand() == expected
    assert torch.equal(images, original)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[2][0])
    for mixed, soft in results:
        assert mixed.shape == images.shape
        assert soft.shape == (6, 5)
        assert torch.allclose(soft.sum(1), torch.ones(6))
        assert (soft > 0).all()  # smoothing


def test_mixing_has_no_label_where_either_image_has_none() -> None:
    mixup = create_mixup(Augmentation(), num_classes=3)
    _, soft = mix(mixup, torch.rand(4, 3, 8, 8), torch.tensor([0, -1, 2, 1]), 0)
    assert soft.sum(1).tolist() == pytest.approx([1, 0, 0, 1])


def test_mixup_and_cutmix_are_switches() -> None:
    assert create_mixup(Augmentation(mixup=0, cutmix=0), 5) is None
    images = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    labels = torch.tensor([0, 1])
    blended, _ = mix(create_mixup(Augmentation(cutmix=0), 2), images, labels, 1)
    pasted, _ = mix(create_mixup(Augmentation(mixup=0), 2), images, labels, 1)
    assert 0 < blended[0].min() == blended[0].max() < 1
    assert set(pasted.unique().tolist()) == {0.0, 1.0}


def test_mixing_takes_pairs() -> None:
    with pytest.raises(DtemError, match="a batch of 3 is odd"):
        mix(create_mixup(Augmentation(), 2), torch.rand(3, 3, 8, 8), torch.zeros(3, dtype=torch.int64), 0)


def test_real_photographs_with_the_whole_recipe(data_dir: Path) -> None:
    source = open_source(str(data_dir / "imagenet" / "val"))
    config = {**CONFIG, "input_size": (3, 224, 224)}
    transform = train_transform(config, Augmentation())
    alone, helped = (
        Loader(
            source, transform, 8, shuffle=True, seed=1, workers=workers, num_classes=1000, on_decode_error="stop"
        ).epoch(0, 124)
        for workers in (0, 2)
    )
    for one, other in zip(alone, helped, strict=True):
        assert one.images.shape == (8, 3, 224, 224)
        assert torch.equal(one.images, other.images)
        assert one.names == other.names
        assert [int(name.split("/")[0]) for name in one.names] == one.labels.tolist()
