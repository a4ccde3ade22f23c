"""A single image from a user: opening it safely, preprocessing it for a model, and turning it back into pixels."""

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from dtem.data.loader import check_shape
from dtem.data.preprocessing import pixel_statistics
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError

if TYPE_CHECKING:
    from PIL import Image

PIXELS = 50_000_000
"""An image of more is refused before it is decoded: a small file may unpack to anything."""


def open_image(source: Any, pixels: int = PIXELS) -> "Image.Image":
    """The image of a file, of its content, of an array (h, w) or (h, w, 3) of bytes, or the image itself; upright."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = "the image"
    if isinstance(source, str | os.PathLike):
        name, path = Path(source).name, Path(source)
        if not path.is_file():
            raise DtemError(f"there is no image file {path}")
        try:
            source = path.read_bytes()
        except OSError as error:
            raise DtemError(f"{path} cannot be read: {error.strerror or error}") from error
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim not in (2, 3):
            raise DtemError(
                f"an array of {source.dtype} and shape {source.shape} is not an image: give bytes, (h, w[, 3])"
            )
        source = Image.fromarray(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is a bound of our own
            image = Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source
            width, height = image.size
            if width * height > pixels:
                raise DtemError(
                    f"{name} has {width} × {height} pixels, more than {pixels / 1e6:g} million: scale it down"
                )
            check_shape(width, height)
            upright: Image.Image = ImageOps.exif_transpose(image)
            upright.load()
    except DtemError:
        raise
    except Exception as error:  # Pillow raises errors of every kind on damaged files
        reason = "not an image file that can be read" if isinstance(error, UnidentifiedImageError) else "damaged"
        raise DtemError(f"{name} is {reason}; give a PNG, JPEG or WebP image") from error
    return upright


def prepare(config: Mapping[str, Any], image: "Image.Image") -> Float[Tensor, "1 c h w"]:
    """The image as the model's evaluation transform makes it; `config` is that of `resolve_data_config`."""
    return eval_transform(config)(image)[None]


def pixels(config: Mapping[str, Any], images: Float[Tensor, "b c h w"]) -> UInt8[np.ndarray, "b h w c"]:
    """The inverse of `prepare`: images as bytes, for display."""
    mean, std = pixel_statistics(config)
    return (255 * (images.cpu().float() * std + mean)).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
