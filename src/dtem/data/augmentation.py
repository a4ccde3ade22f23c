"""Settings of augmentation. Imports nothing heavy: the command line reads it for --help."""

from dataclasses import dataclass
from typing import Literal, get_args

from dtem.errors import DtemError

Crop = Literal["deit", "mild", "none"]
CROPS = {"deit": (0.08, 1.0), "mild": (0.6, 1.0), "none": None}
"""Least and largest area of a random crop."""
_POLICIES = ("rand", "augmix", "original", "v0", "3a")


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images. The default is DeiT's recipe, without repeated augmentation."""

    crop: Crop = "deit"
    """Random resized crop: deit (8 to 100 % of the area), mild (60 to 100 %) or none (the crop of evaluation)."""
    scale: tuple[float, float] | None = None
    """Least and largest area of the random crop, instead of those of `crop`."""
    flip: bool = True
    """Random horizontal flip."""
    auto: str = "rand-m9-mstd0.5-inc1"
    """timm's name of an automatic augmentation (RandAugment, …); empty for none."""
    erasing: float = 0.25
    """Probability of random erasing."""
    jitter: float = 0.0
    """Strength of colour jitter; timm applies it only where `auto` is empty (or 3a)."""
    mixup: float = 0.8
    """Alpha of MixUp; 0 for none."""
    cutmix: float = 1.0
    """Alpha of CutMix; 0 for none. With both, each batch gets one or the other."""

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise DtemError(f"crop = {self.crop!r} must be one of {', '.join(CROPS)}")
        if self.scale is not None:
            if self.crop == "none":
                raise DtemError(f"scale = {self.scale} needs a random crop; with crop = 'none' leave it out")
            if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
                raise DtemError(f"scale = {self.scale} must be two parts of the area, 0 < least <= largest <= 1")
        if self.auto and not self.auto.startswith(_POLICIES):
            raise DtemError(f"auto = {self.auto!r} must begin with one of {', '.join(_POLICIES)}; or be empty")
        if not 0 <= self.erasing <= 1:
            raise DtemError(f"erasing = {self.erasing} is a probability, 0 to 1")
        for name in ("jitter", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise DtemError(f"{name} = {getattr(self, name)} must be 0 or more")
        if self.jitter and self.auto and "3a" not in self.auto:
            raise DtemError(
                f"jitter = {self.jitter} has no effect together with auto = {self.auto!r}; leave one of them out"
            )
