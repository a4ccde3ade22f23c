"""Patching a model by a method's name or by a trained adapter."""

import os

from torch import nn

from dtem.adapters.storage import from_pretrained
from dtem.errors import DtemError
from dtem.handle import Handle, patch
from dtem.integrations import Merger


def attach(
    model: nn.Module,
    method: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    *,
    r: object = 0,
    shortcut: bool = False,
) -> Handle:
    """Patch `model` with a method (default: dtem), or with an adapter, which brings its own."""
    if adapter is None:
        return patch(model, method or "dtem", r, shortcut=shortcut)
    if method is not None:
        raise DtemError(f"the adapter {os.fspath(adapter)} brings its own method; leave method = {method!r} out")
    return from_pretrained(adapter, model, r=r, shortcut=shortcut)


def is_patched(model: object) -> bool:
    """Whether this is a handle, or a model that has one."""
    return isinstance(model, Handle) or isinstance(getattr(model, "dtem", None), Merger)


def as_handle(model: nn.Module | Handle, method: str | None = None, adapter: object = None) -> Handle:
    """The handle of a patched model, which has its method already: another one is refused."""
    handle = model if isinstance(model, Handle) else Handle(model)
    for name, value in (("method", method), ("adapter", adapter)):
        if value is not None:
            raise DtemError(f"{name} = {str(value)!r}: the model is patched with {handle.method.name!r}; leave it out")
    return handle
