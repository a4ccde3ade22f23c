"""Settings of augmentation. (Apart from what applies them: the command line reads this without waiting for torch.)"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Views:
    """Segmentation: what training does to an image and its mask, before a crop of the model's own size is taken."""

    short_side: int = 0
    """Resize to this short side first, and before inference (512 for ADE20K); 0: as the images are."""
    scales: tuple[float, float] | None = (0.5, 2.0)
    """Then resize by a factor drawn between these; 1 1 for none."""
    photometric: bool = True
    """Change brightness, contrast, saturation and hue."""

    def __post_init__(self) -> None:
        if self.short_side < 0:
            raise _error(f"short_side = {self.short_side} must be 0 or more")
        if self.scales is None or len(self.scales) != 2 or not 0 < self.scales[0] <= self.scales[1]:
            raise _error(f"scales = {self.scales} must be two factors, 0 < least <= largest")


def _error(message: str) -> ValueError:
    from dtem.types import DtemError

    return DtemError(message)
