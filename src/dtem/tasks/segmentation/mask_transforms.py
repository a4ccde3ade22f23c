"""Transforms of an image and its mask, joined in one tensor: the channels of the image, then the class of each pixel.

So both go through the same loader as other images. Floats hold class indices exactly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.data.preprocessing import pixel_statistics
from dtem.errors import DtemError
from dtem.tasks.segmentation.classes import IGNORE, Classes
from dtem.tasks.segmentation.crop_config import CropConfig
from dtem.tasks.segmentation.mask_datasets import Pair

Transform = Callable[[Any], Tensor]


def train_transform(config: Mapping[str, Any], crop: CropConfig, flip: bool, classes: Classes) -> Transform:
    """Random scale, crop, flip and photometric distortion. `config` is from `resolve_data_config`."""
    v2, _ = _torchvision()
    steps: list[Any] = [_Scale(crop.short_side, crop.scales or (1.0, 1.0)), _Crop(tuple(config["input_size"][1:]))]
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    if crop.photometric:
        steps.append(v2.RandomPhotometricDistort())
    return _Chain(classes, steps, config)


def eval_transform(config: Mapping[str, Any], classes: Classes) -> Transform:
    """The whole image at its own size, normalised."""
    return _Chain(classes, [], config)


def split(joined: Float[Tensor, "b c+1 h w"]) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, "b h w"]]:
    """Images and class indices of their pixels."""
    return joined[:, :-1], joined[:, -1].long()


class _Chain:
    """Decodes the mask, applies the steps, normalises, joins image and mask."""

    def __init__(self, classes: Classes, steps: list[Any], config: Mapping[str, Any]) -> None:
        self.classes = classes
        self.steps = steps
        self.mean, self.std = pixel_statistics(config)

    def __call__(self, pair: Pair) -> Tensor:
        v2, tv_tensors = _torchvision()
        if pair.image.size != pair.mask.size:
            (width, height), (mask_width, mask_height) = pair.image.size, pair.mask.size
            raise DtemError(
                f"the image {pair.image_path.name} is {width}×{height} and its mask {pair.mask_path.name} "
                f"{mask_width}×{mask_height}: they must be of one size"
            )
        image = tv_tensors.Image(v2.functional.pil_to_tensor(pair.image))
        mask = tv_tensors.Mask(torch.from_numpy(self.classes.read(pair.mask, pair.mask_path.name)))
        for step in self.steps:
            image, mask = step(image, mask)
        pixels = (image.as_subclass(Tensor).float() / 255 - self.mean) / self.std
        return torch.cat([pixels, mask.as_subclass(Tensor).unsqueeze(0).float()])


class _Scale:
    """Resize to a short side of `side` (0: as it is) times a random factor between `scales`."""

    def __init__(self, side: int, scales: tuple[float, float]) -> None:
        self.side = side
        self.scales = scales

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        v2, _ = _torchvision()
        low, high = self.scales
        factor = low + (high - low) * torch.rand(()).item()
        height, width = image.shape[-2:]
        if self.side:
            factor *= self.side / min(height, width)
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        if size == [height, width]:
            return image, mask
        return v2.functional.resize(image, size, antialias=True), v2.functional.resize(mask, size)


class _Crop:
    """Random crop of one size. Smaller images are padded: black, and ignored in the mask."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        v2, tv_tensors = _torchvision()
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}
        image, mask = v2.RandomCrop(self.size, pad_if_needed=True, fill=fill)(image, mask)
        return image, mask


def _torchvision() -> Any:
    """torchvision's transforms v2 and tv_tensors."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    return v2, tv_tensors
