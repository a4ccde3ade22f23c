"""The preprocessing of a model: the only place that calls timm's `resolve_data_config`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtem import integrations
from dtem.data.transforms import Transform, eval_transform
from dtem.errors import DtemError


def resolve_data_config(model: nn.Module) -> dict[str, Any]:
    """Input size, mean, std, crop and interpolation for `model`, as a config of timm.

    The size is that of the model as it was built, not that of its pretrained weights.
    """
    from timm.data.config import resolve_data_config as resolve

    merger = getattr(model, "dtem", None)
    host = merger.method.host if isinstance(merger, integrations.Merger) else integrations.find(model).describe(model)
    if len(host.image) != 3:
        raise DtemError(
            f"{host.name} takes videos of {host.image[0]} frames, which dtem does not read: use your own loop"
        )
    transformers = any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)
    if transformers and not hasattr(model, "pretrained_cfg"):
        raise DtemError(
            f"{host.name}: its preprocessing is in its processor of transformers, which is missing: save it next to "
            "the model (processor.save_pretrained(FOLDER)) and build the model by dtem.create_model, or set "
            "model.pretrained_cfg (a dict with mean, std, interpolation and crop_pct), as timm does"
        )
    return dict(resolve({"input_size": host.image}, model=model))  # type: ignore[no-untyped-call]


def transform_of(model: nn.Module) -> Transform:
    """Preprocessing for evaluation. NaFlex models that `create_model` built get images in their own shapes."""
    from dtem.models.naflex import NaflexTransform

    processor = getattr(model, "naflex_processor", None)
    return eval_transform(resolve_data_config(model)) if processor is None else NaflexTransform(processor)


def pixel_statistics(config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of pixels by channel, each (c, 1, 1)."""
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    return mean, std
