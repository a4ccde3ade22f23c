"""An adapter's own scales and biases for the host's norms, and biases for its linear layers.

A merged token is a mean, so every norm sees another distribution than the host was trained with. A method with
``norms=True`` or ``biases=True`` learns a change Δ of these parameters. While tokens are merged, the host computes with

    θ(r) = θ + f(r) Δ        f(r): the share of patches that all blocks merge, 0 at r = 0

so the adapter tends to the host as r → 0, and one Δ serves every r. The host's own θ is never written to.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dtem.types import HostSpec

Shapes = dict[str, tuple[int, ...]]


class AffineParameters(nn.Module):
    """Δ of parameters of the host, under their names, in a tree of modules like the host's."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            path, _, leaf = name.rpartition(".")
            module: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))

    @torch.no_grad()
    def reset(self, host: nn.Module) -> None:
        """No change, in the precision and on the device of the host's parameters."""
        for path, module in self.leaves():
            own = host.get_submodule(path)._parameters
            for name, parameter in module._parameters.items():
                value = own[name]
                assert parameter is not None
                assert value is not None
                parameter.data = torch.zeros_like(value, requires_grad=False)

    def leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that hold parameters, with the path of the host's module that each belongs to."""
        return ((path, module) for path, module in self.named_modules() if module._parameters)


def affine_parameters(host: HostSpec, norms: bool, biases: bool) -> AffineParameters | None:
    """The parameters of a method with these settings; None without any."""
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
