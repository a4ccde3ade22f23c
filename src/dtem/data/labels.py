"""Names of classes: from a file or list, or ImageNet's where the head has its 1,000 classes."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dtem.errors import DtemError

Labels = str | os.PathLike[str] | Sequence[str]
"""A text file with one class name per line, or the names themselves."""


def class_labels(model: nn.Module, labels: Labels | None = None) -> list[str] | None:
    """One name per class of `model`; without `labels` those of ImageNet if they fit, else None."""
    num_classes = getattr(model, "num_classes", None)
    if labels is None:
        return list(_imagenet().label_descriptions()) if num_classes == 1000 else None
    if isinstance(labels, str | os.PathLike):
        try:
            names = Path(labels).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DtemError(f"labels = '{os.fspath(labels)}' cannot be read: {error}") from error
        source = f"labels = '{os.fspath(labels)}' has {len(names)} lines"
    else:
        names = list(labels)
        source = f"there are {len(names)} labels"
    if num_classes is not None and len(names) != num_classes:
        raise DtemError(f"{source}, and the model {num_classes} classes; give one for each")
    return names


def class_name(model: nn.Module, index: int) -> str:
    """Short name of a class: ImageNet's where the head has its 1,000 classes, else its number."""
    if getattr(model, "num_classes", None) != 1000:
        return str(index)
    description: str = _imagenet().index_to_description(index)
    return description.partition(",")[0]


@functools.cache
def _imagenet() -> Any:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo("imagenet-1k")
