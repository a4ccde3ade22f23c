"""Settings of caption generation in training. Imports nothing heavy: the command line reads it for --help."""

import dataclasses

from dtem.errors import DtemError


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Captions in training and in its evaluations."""

    captions_per_image: int = 1
    """Captioning: reference captions of each image per step; the image is encoded once for all of them."""
    num_beams: int = 5
    """Captioning: beams of generation, where captions are evaluated."""
    max_new_tokens: int = 30
    """Captioning: maximum number of tokens of a caption."""
    question: str = "Describe the image."
    """Vision-language models: what is asked before each text."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "question" and value < 1:
                raise DtemError(f"{name} = {value!r} must be 1 or more")
