"""Segmentation masks drawn over images."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from dtem.errors import DtemError

OPACITY = 0.6


def overlay(
    pixels: UInt8[np.ndarray, "h w 3"],
    classes: Int[np.ndarray, "h w"],
    colours: Sequence[tuple[int, int, int]],
) -> Image.Image:
    """The image with every pixel tinted in the colour of its class; pixels of no class (below 0) stay as they are."""
    if pixels.shape[:2] != classes.shape:
        raise DtemError(f"an image of {pixels.shape[:2]} cannot be covered by a mask of {classes.shape}")
    if classes.max(initial=-1) >= len(colours):
        raise DtemError(f"the mask has class {classes.max()}, and there are {len(colours)} colours")
    tint = np.asarray(colours, np.float32)[classes.clip(min=0)]
    mixed = (1 - OPACITY) * pixels + OPACITY * tint
    return Image.fromarray(np.where(classes[..., None] < 0, pixels, mixed.round()).astype(np.uint8))
