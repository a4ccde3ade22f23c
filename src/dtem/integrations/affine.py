"""Let modules of the host use the adapter's scales and biases (`Method.affine`) while tokens are merged.

The class of each such module becomes a subclass whose `weight` and `bias` are properties: the adapter's while merging
is active, else the module's own, which are never written to. The host's own forward runs, so this works for every kind
of norm, and adds nothing to the computation.
"""

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dtem.errors import DtemError

if TYPE_CHECKING:
    from dtem.integrations.base import Merger

LINK = "dtem_affine"
"""Plain attribute of such a module: the model's `Merger`, the module in `Method.affine` with the parameters, and their
names."""


class Tuned:
    """Mixin of modules whose scale or bias is the adapter's while tokens are merged."""

    @property
    def weight(self) -> Any:
        """The scale of a norm, or the matrix of a linear layer."""
        return _current(self, "weight")

    @weight.setter
    def weight(self, value: Any) -> None:
        _set(self, "weight", value)

    @property
    def bias(self) -> Any:
        """The bias."""
        return _current(self, "bias")

    @bias.setter
    def bias(self, value: Any) -> None:
        _set(self, "bias", value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made at run time, so it is pickled by the class of the host's module."""
        return _empty, (_host_class(self),), self.__dict__


def _current(module: Any, name: str) -> Tensor | None:
    merger, tuned, names = module.__dict__[LINK]
    if merger.active and name in names:
        return getattr(tuned, name)
    own = module.__dict__["_parameters"]
    return own[name] if name in own else module.__dict__.get(name)


def _set(module: Any, name: str, value: Any) -> None:
    """Only plain tensors get here (in replicas of DataParallel): torch handles parameters itself."""
    module.__dict__[name] = value


@functools.cache
def tuned_class(cls: Any) -> Any:
    """The subclass of a module's class."""
    return type(f"Tuned{cls.__name__}", (Tuned, cls), {"__module__": __name__, "__doc__": cls.__doc__})


def _host_class(module: Any) -> type:
    return type(module).__mro__[2]


def _empty(cls: type) -> Any:
    return object.__new__(tuned_class(cls))


def attach(model: nn.Module, merger: "Merger") -> None:
    """Let the modules of `model` use the parameters of `merger.method.affine`, if it has any."""
    affine = merger.method.affine
    for path, tuned in affine.leaves() if affine is not None else ():
        module = model.get_submodule(path)
        if isinstance(module, Tuned):
            raise DtemError(f"{path} is tuned already")
        module.__dict__[LINK] = (merger, tuned, tuple(tuned._parameters))
        kind: Any = type(module)
        module.__class__ = tuned_class(kind)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in model.modules():
        if isinstance(module, Tuned):
            module.__class__ = _host_class(module)
            del module.__dict__[LINK]


def rebind(model: Any) -> None:
    """In a replica of DataParallel, use the replica's own parameters: plain attributes are not replicated."""
    affine = model.dtem.method.affine
    if affine is not None and getattr(model, "_is_replica", False):
        for path, tuned in affine.leaves():
            module = model.get_submodule(path)
            module.__dict__[LINK] = (model.dtem, tuned, module.__dict__[LINK][2])
