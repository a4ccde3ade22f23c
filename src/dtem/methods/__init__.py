"""Token-reduction methods by name. To add one: write its file, add its line here."""

import importlib

from dtem.methods.base import Method
from dtem.types import DtemError

METHODS = {
    "ats": "dtem.methods.ats:Ats",
    "bat": "dtem.methods.bat:Bat",
    "diffrate": "dtem.methods.diffrate:DiffRate",
    "dtem": "dtem.methods.dtem:Dtem",
    "dtem_no_prop": "dtem.methods.dtem_no_prop:DtemNoProp",
    "dtps": "dtem.methods.tps:Dtps",
    "dynamicvit": "dtem.methods.dynamicvit:DynamicVit",
    "etps": "dtem.methods.tps:Etps",
    "evit": "dtem.methods.evit:Evit",
    "evo_vit": "dtem.methods.evo_vit:EvoVit",
    "patch_merger": "dtem.methods.patch_merger:PatchMerger",
    "token_pooling": "dtem.methods.token_pooling:TokenPooling",
    "tome": "dtem.methods.tome:Tome",
    "tome_gumbel": "dtem.methods.tome_gumbel:TomeGumbel",
    "tome_soft": "dtem.methods.tome_soft:TomeSoft",
}

DENSE = {
    "dtem": "dtem.methods.dense:DenseDtem",
    "tome": "dtem.methods.dense:DenseTome",
}
"""The form that a method takes where every patch must be there at the end (segmentation)."""


def find(name: str, dense: bool = False) -> type[Method]:
    """The method class called `name`, or its form for dense prediction."""
    if name not in METHODS:
        raise DtemError(f"method {name!r} is not known; choose one of: {', '.join(sorted(METHODS))}")
    if dense and name not in DENSE:
        raise DtemError(f"method {name!r} has no form for dense prediction; choose one of: {', '.join(sorted(DENSE))}")
    module, cls = (DENSE if dense else METHODS)[name].split(":")
    method: type[Method] = getattr(importlib.import_module(module), cls)
    return method


__all__ = ["DENSE", "METHODS", "Method", "find"]
