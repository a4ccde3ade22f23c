"""Class scores for images of any size: the whole image at once, or window by window."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.errors import DtemError
from dtem.tasks.running import Forward


@dataclass(frozen=True)
class Inference:
    """Settings of inference: the whole image at once, or a sliding window."""

    short_side: int = 0
    """Resize to this short side first; 0: keep the size."""
    window: tuple[int, int] | None = None
    """Height and width of a sliding window; None: the whole image at once."""
    stride: tuple[int, int] | None = None
    """Stride of the window; None: the window itself, so that windows do not overlap."""

    def __post_init__(self) -> None:
        if self.stride is not None and self.window is None:
            raise DtemError(f"stride = {_size(self.stride)} requires a window: give both")
        sides = (*(self.window or ()), *(self.stride or ()))
        if self.short_side < 0 or any(side < 1 for side in sides):
            raise DtemError(f"sizes must be positive: {self}")
        if self.window and self.stride and any(s > w for s, w in zip(self.stride, self.window, strict=True)):
            raise DtemError(
                f"stride = {_size(self.stride)} is larger than window = {_size(self.window)}: pixels would be left out"
            )

    def __call__(self, forward: Forward, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k h w"]:
        """Class scores in the size of the images."""
        height, width = images.shape[2:]
        inner = self.resized((height, width))
        if inner != (height, width):
            images = F.interpolate(images, size=inner, mode="bilinear", antialias=True)
        scores = forward(images) if self.window is None else self._slide(forward, images, self.window)
        return scores if inner == (height, width) else F.interpolate(scores, size=(height, width), mode="bilinear")

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image after resizing its short side."""
        factor = self.short_side / min(size) if self.short_side else 1.0
        return round(size[0] * factor), round(size[1] * factor)

    def _slide(self, forward: Forward, images: Tensor, window: tuple[int, int]) -> Tensor:
        """Mean scores over all windows that cover a pixel.

        The last window of a row ends with the image; an image smaller than a window is padded."""
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


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _starts(side: int, part: int, step: int) -> list[int]:
    """Where windows begin: every `step`, the last one at the end."""
    return [*range(0, side - part, step), side - part]


def predict(
    forward: Forward, images: Float[Tensor, "b c h w"], inference: Inference | None = None
) -> Int[Tensor, "b h w"]:
    """The class of each pixel."""
    with torch.inference_mode():
        classes: Tensor = (inference or Inference())(forward, images).argmax(dim=1)
    return classes
