"""Settings of scaling and cropping in segmentation. Imports nothing heavy: the command line reads it for --help."""

from dataclasses import dataclass

from dtem.errors import DtemError


@dataclass(frozen=True)
class CropConfig:
    """Segmentation: augmentation of image and mask before a random crop of the model's input size."""

    short_side: int = 0
    """Segmentation: resize the short side to this first, also for evaluation (ADE20K: 512); 0: no resizing."""
    scales: tuple[float, float] | None = (0.5, 2.0)
    """Segmentation: then scale by a random factor between these; 1 1 for none."""
    photometric: bool = True
    """Segmentation: change brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        if self.short_side < 0:
            raise DtemError(f"short_side = {self.short_side} must be 0 or more")
        if self.scales is None or len(self.scales) != 2 or not 0 < self.scales[0] <= self.scales[1]:
            raise DtemError(f"scales = {self.scales} must be two factors, 0 < least <= largest")
