"""Images that a model of timm takes, and a message that helps where it does not."""

from typing import Any

from torch import Tensor, nn

from dtem.types import DtemError


def channels(model: Any) -> int:
    """Of an image: what the first convolution takes."""
    return next(module.in_channels for module in model.patch_embed.modules() if isinstance(module, nn.Conv2d))


def check_image(model: Any, x: Tensor) -> None:
    """Refuse an image that the host would refuse, with a message that helps."""
    embed, wanted_channels = model.patch_embed, channels(model)
    if x.ndim != 4 or x.shape[1] != wanted_channels:
        raise DtemError(f"expected images of shape (batch, {wanted_channels}, height, width), got {tuple(x.shape)}")
    size, wanted = tuple(x.shape[-2:]), tuple(embed.img_size)
    if embed.strict_img_size and size != wanted:
        raise DtemError(
            f"the image is {size[0]}×{size[1]}, the model takes {wanted[0]}×{wanted[1]}: resize it, or build the "
            "model with dynamic_img_size=True (or img_size=…)"
        )
    rest = [side % patch for side, patch in zip(size, embed.patch_size, strict=True)]
    if any(rest) and not embed.dynamic_img_pad:
        raise DtemError(
            f"the image is {size[0]}×{size[1]}, which patches of {embed.patch_size[0]}×{embed.patch_size[1]} do not "
            "divide: resize it, or build the model with dynamic_img_pad=True"
        )
