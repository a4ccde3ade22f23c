"""Class scores for images of any size: the whole image at once, or window by window."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.types import DtemError

Forward = Callable[[Tensor], Tensor]
"""Images (b, c, h, w) -> class scores (b, k, h, w)."""


@dataclass(frozen=True)
class Inference:
    """How an image goes through the model."""

    short_side: int = 0
    """Resize to this short side before; 0: as it is."""
    window: tuple[int, int] | None = None
    """Height and width of a sliding window; None: the whole image at once."""
    stride: tuple[int, int] | None = None
    """Of the window; None: the window itself, so that neighbours touch."""

    def __post_init__(self) -> None:
        if self.stride is not None and self.window is None:
            raise DtemError(f"stride = {self.stride} goes with a window")
        sides = (*(self.window or ()), *(self.stride or ()))
        if self.short_side < 0 or any(side < 1 for side in sides):
            raise DtemError(f"sizes must be positive: {self}")
        if self.window and self.stride and any(s > w for s, w in zip(self.stride, self.window, strict=True)):
            raise DtemError(
                f"stride = {self.stride} is larger than the window, {self.window}: pixels would be left out"
            )

    def __call__(self, forward: Forward, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k h w"]:
        """Scores in the images' own size."""
        height, width = images.shape[2:]
        inner = self.resized((height, width))
        if inner != (height, width):
            images = F.interpolate(images, size=inner, mode="bilinear", antialias=True)
        scores = forward(images) if self.window is None else self._slide(forward, images, self.window)
        return scores if inner == (height, width) else F.interpolate(scores, size=(height, width), mode="bilinear")

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image once its short side is what was asked for."""
        factor = self.short_side / min(size) if self.short_side else 1.0
        return round(size[0] * factor), round(size[1] * factor)

    def _slide(self, forward: Forward, images: Tensor, window: tuple[int, int]) -> Tensor:
        """The mean over all windows that cover a pixel. The last window of a row ends with the image; an image that is
        smaller than a window is padded."""
        height, width = images.shape[2:]
        images = F.pad(images, (0, max(0, window[1] - width), 0, max(0, window[0] - height)))
        tops, lefts = (
            _starts(side, part, step)
            for side, part, step in zip(images.shape[2:], window, self.stride or window, strict=True)
        )
        total: Tensor | None = None
        covered = images.new_zeros(1, 1, *images.shape[2:])
        for top in tops:
            for left in lefts:
                place = (..., slice(top, top + window[0]), slice(left, left + window[1]))
                scores = forward(images[place])
                if total is None:
                    total = scores.new_zeros(*scores.shape[:2], *images.shape[2:])
                total[place] += scores
                covered[place] += 1
        assert total is not None
        return (total / covered)[..., :height, :width]


def _starts(side: int, part: int, step: int) -> list[int]:
    """Where windows begin: every `step`, the last one at the end."""
    return [*range(0, side - part, step), side - part]


def predict(
    forward: Forward, images: Float[Tensor, "b c h w"], inference: Inference | None = None
) -> Int[Tensor, "b h w"]:
    """The likeliest class of each pixel."""
    with torch.inference_mode():
        found: Tensor = (inference or Inference())(forward, images).argmax(dim=1)
    return found
