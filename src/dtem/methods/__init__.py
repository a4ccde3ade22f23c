"""Token-reduction methods by name: one file each, or registered by a user (`register_method`)."""

from collections.abc import Callable
from typing import TypeVar, overload

from dtem.errors import DtemError
from dtem.methods.base import Config, Method
from dtem.registry import Registry

METHODS = Registry(
    "method",
    {
        "algm": "dtem.methods.algm:Algm",
        "ats": "dtem.methods.ats:Ats",
        "bat": "dtem.methods.bat:Bat",
        "diffrate": "dtem.methods.diffrate:DiffRate",
        "dtem": "dtem.methods.dtem:Dtem",
        "dtps": "dtem.methods.tps:Dtps",
        "dynamicvit": "dtem.methods.dynamicvit:DynamicVit",
        "etps": "dtem.methods.tps:Etps",
        "evit": "dtem.methods.evit:Evit",
        "evo_vit": "dtem.methods.evo_vit:EvoVit",
        "mctf": "dtem.methods.mctf:Mctf",
        "patch_merger": "dtem.methods.patch_merger:PatchMerger",
        "pitome": "dtem.methods.pitome:Pitome",
        "ppt": "dtem.methods.ppt:Ppt",
        "token_pooling": "dtem.methods.token_pooling:TokenPooling",
        "tome": "dtem.methods.tome:Tome",
    },
    "dtem.methods",
)
DENSE_METHODS = Registry(
    "method for dense prediction",
    {
        "algm": "dtem.methods.algm:Algm",
        "dtem": "dtem.methods.dense:DenseDtem",
        "tome": "dtem.methods.dense:DenseTome",
    },
    "dtem.dense_methods",
)
"""Variants of methods for dense prediction (segmentation), where every patch is needed at the end."""

M = TypeVar("M", bound=type[Method])


@overload
def register_method(cls: M) -> M: ...
@overload
def register_method(*, dense: bool = False) -> Callable[[M], M]: ...
def register_method(cls: M | None = None, *, dense: bool = False) -> M | Callable[[M], M]:
    """Register a method of your own by its `name`: as a decorator, or by a call.

    A package can register it without code: by an entry point ``name = "module:Class"`` in the group ``dtem.methods``.

    Args:
        cls: a subclass of `dtem.methods.Method`.
        dense: it is the variant for dense prediction (a `dtem.methods.dense.DenseMethod`).

    Examples:
        >>> @dtem.register_method
        ... class MyMethod(Method):
        ...     name = "mine"
        >>> handle = dtem.patch(model, "mine", r=16)
    """
    registry = DENSE_METHODS if dense else METHODS

    def register(cls: M) -> M:
        registry.register(cls.name, cls)
        return cls

    return register if cls is None else register(cls)


def list_methods() -> list[str]:
    """Names of all methods, built in and registered.

    Examples:
        >>> "tome" in dtem.list_methods()
        True
    """
    return list(METHODS)


def find(name: str, dense: bool = False) -> type[Method]:
    """The class of the method `name`, or of its variant for dense prediction."""
    cls: type[Method] = METHODS[name]
    if dense:
        if name not in DENSE_METHODS:
            listed = ", ".join(DENSE_METHODS)
            raise DtemError(f"method {name!r} has no variant for dense prediction; choose one of: {listed}")
        cls = DENSE_METHODS[name]
    return cls


def find_by_config(config: Config, dense: bool = False) -> type[Method]:
    """The class of the only method with this type of config."""
    registry = DENSE_METHODS if dense else METHODS
    classes = [each for each in map(registry.__getitem__, registry) if each.config_class is type(config)]
    if len(classes) != 1:
        listed = ", ".join(each.name for each in classes) or "none"
        raise DtemError(
            f"a {type(config).__name__} does not name one method (methods that take it: {listed}); pass the method by "
            "name and its options as keywords"
        )
    cls: type[Method] = classes[0]
    return cls


__all__ = ["DENSE_METHODS", "METHODS", "Config", "Method", "find", "find_by_config", "list_methods", "register_method"]
