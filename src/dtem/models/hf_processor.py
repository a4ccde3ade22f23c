"""The preprocessing that a model of transformers comes with, read from its image processor in the terms of timm."""

import math
from typing import Any

from dtem.errors import DtemError, require

ANY_SIZE = ("dinov2", "dinov2_with_registers", "dinov3_vit")
"""Model types that take images of any size, so that the processor's size is used and not that of the configuration."""
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_BYTES = 255.0
Size = tuple[int, int]


def read_processor(source: str, revision: str | None = None) -> Any:
    """The image processor of a model of transformers; None if it comes without one.

    Args:
        source: folder or Hub id.
        revision: branch, tag or commit on the Hub.
    """
    transformers = require("transformers", "transformers")
    try:
        return transformers.AutoImageProcessor.from_pretrained(source, revision=revision or "main")
    except Exception:  # transformers and the Hub raise errors of every kind; verbs that need it say that it is missing
        return None


def preprocessing(processor: Any, config: Any, name: str) -> dict[str, Any]:
    """`pretrained_cfg`, as timm's models have it, of a model of transformers with this configuration."""
    vision = getattr(config, "vision_config", config)
    size = _pair(getattr(vision, "image_size", None) or naflex_square(processor, vision))
    return as_timm_config(processor, size, vision.model_type in ANY_SIZE, name)


def as_timm_config(processor: Any, size: Size, any_size: bool = False, name: str = "the model") -> dict[str, Any]:
    """An image processor in the terms of timm: what is resized, cropped, scaled and normalised, and how.

    Args:
        processor: of transformers.
        size: height and width that the model takes.
        any_size: it takes the processor's own size as well.
        name: for messages.
    """
    resize, crop = _size(processor, "size"), _size(processor, "crop_size")
    if not getattr(processor, "do_center_crop", None):
        crop = None
    if getattr(processor, "max_num_patches", None) is not None:  # NaFlex: here every image is made square
        resize, shortest, crop = size, None, None
    else:
        shortest = _field(getattr(processor, "size", None), "shortest_edge")
    if not getattr(processor, "do_resize", True) or (resize is None and (shortest is None or crop is None)):
        raise DtemError(
            f"{name}: its {type(processor).__name__} does not bring all images to one shape, which batches need: set "
            "model.pretrained_cfg (a dict with mean, std, interpolation and crop_pct), as timm does"
        )
    resample = int(getattr(processor, "resample", 2))
    if resample not in _INTERPOLATIONS:
        raise DtemError(f"{name}: its image processor resizes by Pillow's filter {resample}, which timm does not have")
    final = crop or resize
    before = shortest if resize is None else resize[0]
    assert final is not None
    assert before is not None
    mean, std = _normalisation(processor)
    return {
        "input_size": (len(mean), *(final if any_size else size)),
        "mean": mean,
        "std": std,
        "interpolation": _INTERPOLATIONS[resample],
        "crop_pct": final[0] / before,
        "crop_mode": "center" if resize is None else "squash",
    }


def _normalisation(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels from 0 to 1."""
    mean, std = tuple(processor.image_mean or (0.5,) * 3), tuple(processor.image_std or (0.5,) * 3)
    if not processor.do_normalize:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    scale = _BYTES * (processor.rescale_factor if processor.do_rescale else 1.0)
    if abs(scale - 1) < 1e-6:
        return mean, std
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _size(processor: Any, name: str) -> Size | None:
    size = getattr(processor, name, None)
    if isinstance(size, int):
        return size, size
    height, width = _field(size, "height"), _field(size, "width")
    return None if height is None or width is None else (height, width)


def _field(size: Any, name: str) -> int | None:
    value = size.get(name) if isinstance(size, dict) else getattr(size, name, None)
    return None if value is None else int(value)


def _pair(size: Any) -> Size:
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def naflex_square(processor: Any, vision: Any) -> int:
    """The side of a square image of at most as many patches as the processor of a NaFlex model makes."""
    return math.isqrt(getattr(processor, "max_num_patches", vision.num_patches)) * int(vision.patch_size)
