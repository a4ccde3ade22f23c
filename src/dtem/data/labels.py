"""Classes of a model: how many, and their names: from a file or list, the model's own, or ImageNet's."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dtem.errors import DtemError

IMAGENET = 1000
Labels = str | os.PathLike[str] | Sequence[str]
"""A text file with one class name per line, or the names themselves."""


def num_classes(model: Any) -> int | None:
    """Classes of a model's head: 0 if it gives features, None if it does not say."""
    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        classifies = any(kind in type(model).__name__ for kind in ("ForImageClassification", "ForVideoClassification"))
        return int(model.config.num_labels) if classifies else 0
    count: int | None = getattr(model, "num_classes", None)
    return count


def class_labels(model: nn.Module, labels: Labels | None = None) -> list[str] | None:
    """One name per class of `model`; without `labels` the model's own, or those of ImageNet if they fit, else None."""
    count = num_classes(model)
    if labels is None:
        return _own_names(model) or (list(_imagenet().label_descriptions()) if count == IMAGENET else None)
    if isinstance(labels, str | os.PathLike):
        try:
            names = Path(labels).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DtemError(f"labels = '{os.fspath(labels)}' cannot be read: {error}") from error
        source = f"labels = '{os.fspath(labels)}' has {len(names)} lines"
    else:
        names = list(labels)
        source = f"there are {len(names)} labels"
    if count is not None and len(names) != count:
        raise DtemError(f"{source}, and the model {count} classes; give one for each")
    return names


def class_name(model: nn.Module, index: int) -> str:
    """Short name of a class: the model's own, or ImageNet's where the head has its 1,000 classes, else its number."""
    own = _own_names(model)
    if own is None and num_classes(model) != IMAGENET:
        return str(index)
    description: str = own[index] if own else _imagenet().index_to_description(index)
    return description.partition(",")[0]


def _own_names(model: Any) -> list[str] | None:
    """The class names in a configuration of transformers; its placeholders (LABEL_0, …) are none."""
    names: dict[int, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    count = num_classes(model)
    if not count or sorted(names) != list(range(count)) or names[0] == "LABEL_0":
        return None
    return [names[index] for index in range(count)]


@functools.cache
def _imagenet() -> Any:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo("imagenet-1k")
