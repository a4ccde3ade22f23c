"""Image transforms and MixUp by timm, with their randomness as a function of a seed."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dtem.data.augmentation import CROPS, Augmentation
from dtem.errors import DtemError

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[["Image.Image"], Tensor]


def eval_transform(config: Mapping[str, Any]) -> Transform:
    """Preprocessing of evaluation. `config` is from `dtem.data.preprocessing.resolve_data_config`."""
    return _Chain(config, _eval_steps(config))


def train_transform(config: Mapping[str, Any], augmentation: Augmentation) -> Transform:
    """Preprocessing of training, with augmentation."""
    from timm.data.transforms_factory import create_transform

    options: dict[str, Any] = {
        "scale": augmentation.scale or CROPS[augmentation.crop],
        "hflip": 0.5 if augmentation.flip else 0.0,
        "color_jitter": augmentation.jitter or None,
        "auto_augment": augmentation.auto or None,
        "re_prob": augmentation.erasing,
        "re_mode": "pixel",
    }
    try:
        views, colours, tensors = create_transform(**config, is_training=True, separate=True, **options)
    except (AssertionError, KeyError, ValueError) as error:
        raise DtemError(f"timm cannot build auto = {augmentation.auto!r}: {error or 'it is not known'}") from error
    for step in colours.transforms:
        _allow_no_bits(step)
    crop, *flip = views.transforms
    crops = _eval_steps(config)[:-2] if augmentation.crop == "none" else [crop]  # without tensor and mean, std
    return _Chain(config, [*crops, *flip, *colours.transforms, *tensors.transforms])


def _allow_no_bits(step: Any) -> None:
    """Let Posterize keep 0 bits, as timm's strongest does; newer Pillow refuses that, on one image in 600 for DeiT."""
    for op in [*getattr(step, "ops", []), *(op for ops in getattr(step, "policy", []) for op in ops)]:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize


def posterize(image: "Image.Image", bits: int, **_: Any) -> "Image.Image":
    """Keep the highest `bits` of each channel; with 0 bits the image is black."""
    from PIL import Image, ImageOps

    return ImageOps.posterize(image, min(bits, 8)) if bits > 0 else Image.new(image.mode, image.size)


def _eval_steps(config: Mapping[str, Any]) -> list[Any]:
    from timm.data.transforms_factory import create_transform

    return list(create_transform(**config, is_training=False).transforms)


class _Chain:
    """Converts an image to the channels of the model, then applies timm's steps."""

    def __init__(self, config: Mapping[str, Any], steps: list[Any]) -> None:
        channels = config["input_size"][0]
        if channels not in (1, 3):
            raise DtemError(f"input_size = {config['input_size']}: images have 1 or 3 channels, not {channels}")
        self.mode = "L" if channels == 1 else "RGB"
        self.steps = steps

    def __call__(self, image: "Image.Image") -> Tensor:
        value: Any = to_mode(image, self.mode)
        for step in self.steps:
            value = step(value)
        return value


def to_mode(image: "Image.Image", mode: str) -> "Image.Image":
    """Convert an image of any mode to ``RGB`` or ``L``."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey: Pillow would cut off what is above 255
        values = np.asarray(image)
        deep = image.mode != "I" or values.max() > 255
        image = Image.fromarray((values >> 8 if deep else values).clip(0, 255).astype(np.uint8))
    if "transparency" in image.info:  # a palette with transparent colours goes by way of its alpha
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of random, numpy and torch (CPU) inside; afterwards they continue as before."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def create_mixup(augmentation: Augmentation, num_classes: int, smoothing: float = 0.0) -> Any:
    """timm's MixUp and CutMix for `mix`; None where both are off."""
    if not augmentation.mixup and not augmentation.cutmix:
        return None
    from timm.data.mixup import Mixup

    make: Any = Mixup  # untyped
    return make(augmentation.mixup, augmentation.cutmix, label_smoothing=smoothing, num_classes=num_classes)


def mix(mixup: Any, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Mix a batch with its reverse, by random numbers that depend on `seed` alone.

    Returns mixed images and class probabilities. Where one of two mixed images has no label, its row is zero and adds
    nothing to a cross-entropy.
    """
    if len(images) % 2:
        raise DtemError(f"MixUp and CutMix mix pairs, and a batch of {len(images)} is odd; take an even batch size")
    known = labels >= 0
    with seeded(seed):
        mixed, soft = mixup(images.clone(), labels.clamp(min=0))
    return mixed, soft * (known & known.flip(0))[:, None]
