"""An adapter's own scales and biases for the host's norms, and biases for its linear layers.

A merged token is a mean, so every norm sees another distribution than the host was trained with. A method with
``norms=True`` or ``biases=True`` has parameters of its own for them, used while tokens are merged. They have the names
and the initial values of the host's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtem.types import HostSpec

Shapes = dict[str, tuple[int, ...]]


class AffineParameters(nn.Module):
    """Parameters under the names of the host's, in a tree of modules like the host's."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            path, _, leaf = name.rpartition(".")
            module: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape)))

    @torch.no_grad()
    def copy_from(self, host: nn.Module) -> None:
        """Start from the host's own values, in its precision."""
        for name, parameter in self.named_parameters():
            path, _, leaf = name.rpartition(".")
            own: Any = host.get_submodule(path)._parameters[leaf]  # the attribute is this one while tokens are merged
            parameter.data = torch.empty_like(own) if own.is_meta else own.detach().clone()

    def leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that hold parameters, with the path of the host's module that each belongs to."""
        return ((path, module) for path, module in self.named_modules() if module._parameters)


def affine_parameters(host: HostSpec, norms: bool, biases: bool) -> AffineParameters | None:
    """The parameters that a method with these settings has, not initialised; None without any."""
    shapes = {**(host.norms if norms else {}), **(host.biases if biases else {})}
    return AffineParameters(shapes) if shapes else None


def find_affine(model: nn.Module, roots: tuple[str, ...]) -> tuple[Shapes, Shapes]:
    """The fields `norms` and `biases` of a `HostSpec`: names and shapes in the submodules `roots`."""
    norms: Shapes = {}
    biases: Shapes = {}
    for root in roots:
        for path, module in model.get_submodule(root).named_modules(prefix=root):
            own: dict[str, Tensor | None] = dict(module._parameters)
            weight, bias = own.get("weight"), own.get("bias")
            if "Norm" in type(module).__name__ and weight is not None and weight.ndim == 1:
                norms[f"{path}.weight"] = tuple(weight.shape)
                if bias is not None:
                    norms[f"{path}.bias"] = tuple(bias.shape)
            elif isinstance(module, nn.Linear) and isinstance(bias, Tensor):
                biases[f"{path}.bias"] = tuple(bias.shape)
    return norms, biases
