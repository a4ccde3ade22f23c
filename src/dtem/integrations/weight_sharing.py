"""Copies of a model that share its weights."""

import copy
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def share(model: Model) -> Model:
    """A copy of `model` with the same weights and buffers. Patching the copy leaves the model unchanged."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)
