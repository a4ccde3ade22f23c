"""The preprocessing of a model: the only place that calls timm's `resolve_data_config`."""

from typing import Any

from torch import nn

from dtem import integrations
from dtem.errors import DtemError


def resolve_data_config(model: nn.Module) -> dict[str, Any]:
    """Input size, mean, std, crop and interpolation for `model`, as a config of timm.

    The size is that of the model as it was built, not that of its pretrained weights.
    """
    from timm.data.config import resolve_data_config as resolve

    merger = getattr(model, "dtem", None)
    host = merger.method.host if isinstance(merger, integrations.Merger) else integrations.find(model).describe(model)
    transformers = any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)
    if transformers and not hasattr(model, "pretrained_cfg"):
        raise DtemError(
            f"{host.name}: its preprocessing is in its processor of transformers, which dtem does not read: use your "
            "own loop, or set model.pretrained_cfg (a dict with mean, std, interpolation and crop_pct), as timm does"
        )
    return dict(resolve({"input_size": host.image}, model=model))  # type: ignore[no-untyped-call]
