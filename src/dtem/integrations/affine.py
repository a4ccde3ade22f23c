"""Let modules of the host compute with the adapter's scales and biases (`Method.affine`) while tokens are merged.

The class of each such module becomes a subclass whose `weight` and `bias` are properties: θ + f(r) Δ while merging is
active, else the module's own θ, which is never written to. The host's own forward runs, so this works for every kind of
norm. (The sum of a few hundred numbers is computed anew each time: kept ones could be stale. Exported files hold sums.)
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtem.errors import DtemError

if TYPE_CHECKING:
    from dtem.integrations.base import Merger

LINK = "dtem_affine"
"""Plain attribute of such a module: its `Link`."""


class Link:
    """What such a module computes with.

    Args:
        merger: of the model.
        delta: the module in `Method.affine` that holds its Δ.
    """

    def __init__(self, merger: "Merger", delta: nn.Module) -> None:
        self.merger = merger
        self.delta = delta
        self.names = tuple(delta._parameters)

    def current(self, name: str, own: Tensor) -> Tensor:
        """The parameter `name` at the present r."""
        if not self.merger.active or name not in self.names:
            return own
        if hasattr(own, "full_tensor"):  # FSDP2 looks at its shards; in a forward they are gathered
            return own
        return torch.add(own, getattr(self.delta, name), alpha=self.merger.merged_share)


class Tuned:
    """Mixin of modules whose scale or bias the adapter changes while tokens are merged."""

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
    parameters = module.__dict__["_parameters"]
    own = parameters[name] if name in parameters else module.__dict__.get(name)
    return None if own is None else module.__dict__[LINK].current(name, own)


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
    """Let the modules of `model` compute with `merger.method.affine`, if there is any."""
    affine = merger.method.affine
    for path, delta in affine.leaves() if affine is not None else ():
        module = model.get_submodule(path)
        if isinstance(module, Tuned):
            raise DtemError(f"{path} is tuned already: it belongs to another patched model too; copy it first")
        module.__dict__[LINK] = Link(merger, delta)
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
        for path, delta in affine.leaves():
            module = model.get_submodule(path)
            names = module.__dict__[LINK].names
            module.__dict__[LINK] = Link(model.dtem, delta)
            module.__dict__[LINK].names = names


@torch.no_grad()
def merge_into_host(model: Any) -> None:
    """Write the parameters at the present r into the host's own, for good: for a copy that is exported."""
    if model.dtem.method.affine is None:
        return
    tuned: list[Any] = [module for module in model.modules() if isinstance(module, Tuned)]
    values = [(module, name, _current(module, name)) for module in tuned for name in ("weight", "bias")]
    detach(model)
    model.dtem.method.affine = None
    for module, name, value in values:
        own = module._parameters.get(name)
        if own is not None and value is not None and value is not own:
            module.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=own.requires_grad))
