"""Settings of augmentation. (Apart from what applies them: the command line reads this without waiting for torch.)"""

from dataclasses import dataclass

CROPS = {"deit": (0.08, 1.0), "mild": (0.6, 1.0), "none": None}
_POLICIES = ("rand", "augmix", "original", "v0", "3a")


@dataclass(frozen=True)
class Augmentation:
    """What training does to an image. The default is DeiT's recipe, without repeated augmentation."""

    crop: str = "deit"
    """``deit`` (a random part of 8 to 100 % of the area), ``mild`` (60 to 100 %) or ``none`` (evaluation's crop)."""
    scale: tuple[float, float] | None = None
    """Least and largest part of the area, instead of what `crop` says."""
    flip: bool = True
    """Mirror every other image."""
    auto: str = "rand-m9-mstd0.5-inc1"
    """timm's name of an automatic augmentation; empty for none."""
    erasing: float = 0.25
    """Probability that a rectangle is filled with noise."""
    jitter: float = 0.0
    """Strength of colour changes; timm has them only where `auto` is empty (or 3a)."""
    mixup: float = 0.8
    """Alpha of MixUp; 0 for none."""
    cutmix: float = 1.0
    """Alpha of CutMix; 0 for none. With both, each batch gets one or the other."""

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise _error(f"crop = {self.crop!r} must be one of {', '.join(CROPS)}")
        if self.scale is not None:
            if self.crop == "none":
                raise _error(f"scale = {self.scale} needs a random crop; with crop = 'none' leave it out")
            if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
                raise _error(f"scale = {self.scale} must be two parts of the area, 0 < least <= largest <= 1")
        if self.auto and not self.auto.startswith(_POLICIES):
            raise _error(f"auto = {self.auto!r} must begin with one of {', '.join(_POLICIES)}; or be empty")
        if not 0 <= self.erasing <= 1:
            raise _error(f"erasing = {self.erasing} is a probability, 0 to 1")
        for name in ("jitter", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise _error(f"{name} = {getattr(self, name)} must be 0 or more")
        if self.jitter and self.auto and "3a" not in self.auto:
            raise _error(f"jitter = {self.jitter} has no effect beside auto = {self.auto!r}; leave one of them out")


def _error(message: str) -> ValueError:
    from dtem.types import DtemError

    return DtemError(message)
