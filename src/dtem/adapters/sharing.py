"""Several patched forms of one model at the price of one."""

import copy
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def share(model: Model) -> Model:
    """A copy of `model` that shares its weights and buffers: patch it, and the model itself stays as it is."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, kept)
