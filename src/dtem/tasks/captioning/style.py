"""Settings of captioning that training and evaluation share. Nothing heavy is imported: this is read for --help."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Style:
    """How captions are read and written."""

    captions: int = 1
    """Captioning: captions of each image in a training step; the image is encoded once for all of them."""
    beams: int = 5
    """Captioning: beams of generation, where captions are scored."""
    longest: int = 30
    """Captioning: most tokens of a caption."""

    def __post_init__(self) -> None:
        for name in ("captions", "beams", "longest"):
            if (value := getattr(self, name)) < 1:
                from dtem.types import DtemError

                raise DtemError(f"{name} = {value!r} must be 1 or more")
