"""Faster CPU inference: one reused buffer for large products, and fused bias, activation and residual.

On CPU a large new buffer costs page faults: GELU takes three times as long out of place as in place. `CpuWorkspace`
lives for one forward and reuses one buffer for its largest products (qkv, then the hidden layer of the MLP, block after
block); activations and residuals are computed in place. Small features (batch 1) stay in the cache, where passes over
memory cost more: there, oneDNN adds bias, GELU or residual in the product itself. Values are those of the host's own
modules. Used only without gradients, and only for blocks whose linear layers are plain (`is_plain_linear`): one that is
wrapped, hooked, quantised, offloaded or sharded is called as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dtem.integrations.affine import tuned_class

#: Features with fewer entries than this (1 MB) are taken to stay in the cache.
SMALL = 1 << 18


PLAIN_LINEAR = (nn.Linear, tuned_class(nn.Linear))


class CpuWorkspace:
    """The buffer of one forward. The result of `linear` is valid until the next call."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """`layer(x)`, into the buffer."""
        if not _fits(layer, x):
            return layer(x)
        if _small(x):
            return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
        rows = x.reshape(-1, x.shape[-1])
        shape = (rows.shape[0], layer.out_features)
        needed = shape[0] * shape[1]
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = x.new_empty(needed)
        out = self._buffer[:needed].view(shape)
        torch.addmm(layer.bias, rows, layer.weight.t(), out=out)
        return out.view(*x.shape[:-1], shape[1])

    def gelu(self, layer: nn.Linear, x: Tensor, approximate: str) -> Tensor:
        """GELU of `layer(x)`, into the buffer."""
        if _fits(layer, x) and _small(x):
            return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], approximate)
        return torch.ops.aten.gelu_(self.linear(layer, x), approximate=approximate)

    def residual(self, x: Tensor, layer: nn.Linear, y: Tensor) -> Tensor:
        """`x + layer(y)`, in one matrix product that accumulates into x + bias."""
        if not _fits(layer, y):
            return layer(y).add_(x)
        if _small(x):
            return torch.ops.mkldnn._linear_pointwise.binary(y, x.contiguous(), layer.weight, layer.bias, "add")
        out = x.contiguous() + layer.bias
        out.view(-1, out.shape[-1]).addmm_(y.reshape(-1, y.shape[-1]), layer.weight.t())
        return out


def _fits(layer: nn.Linear, x: Tensor) -> bool:
    return layer.bias is not None and x.dtype == layer.weight.dtype and x.device == layer.weight.device


def is_plain_linear(layer: Any) -> bool:
    """Whether `layer(x)` is nothing but a matrix product with its own weights, so that these can be used directly."""
    return (
        type(layer) in PLAIN_LINEAR
        and are_untouched(layer)  # by accelerate's hooks, or by hand
        and _is_plain_tensor(layer.weight)
    )


def _is_plain_tensor(weight: Tensor) -> bool:
    """Whether it is no quantised or sharded tensor. Tracing and counting put plain or fake tensors in its place."""
    kind = type(weight)
    return kind in (nn.Parameter, Tensor) or kind.__module__.startswith("torch._subclasses.")


def create(x: Tensor) -> CpuWorkspace | None:
    """A `CpuWorkspace` for this forward; None if it would not be faster, or with gradients, compilation or autocast."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if x.device.type != "cpu" or (x.numel() < SMALL and not _small(x)):
        return None
    return None if torch.is_autocast_enabled("cpu") else CpuWorkspace()


def _small(x: Tensor) -> bool:
    """Whether to compute products of these features with oneDNN: they are small, and it is available."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return x.numel() < SMALL and x.dtype == torch.float32 and available


def are_untouched(*modules: nn.Module) -> bool:
    """Whether these modules have the forward of their class and no hooks, so that their parts can be called instead."""
    return not any("forward" in module.__dict__ for module in modules) and not has_hooks(*modules)


def has_hooks(*modules: nn.Module) -> bool:
    """Whether one of these modules, or all modules of this process, have forward hooks."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def is_identity(module: nn.Module) -> bool:
    """Whether `module` returns its input. (At batch 1 such calls cost as much as small kernels.)"""
    kind = type(module)
    plain = kind is nn.Identity or (kind is nn.Dropout and not module.training)
    return plain and are_untouched(module)
