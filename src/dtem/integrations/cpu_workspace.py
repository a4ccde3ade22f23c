"""Faster CPU inference: one reused buffer for large products, and fused bias, activation and residual.

On CPU a large new buffer costs page faults: GELU takes three times as long out of place as in place. `CpuWorkspace`
lives for one forward and reuses one buffer for its largest products (qkv, then the hidden layer of the MLP, block after
block); activations and residuals are computed in place. Where oneDNN is faster (`ops.linear`), it adds bias, GELU or
residual in the product itself. Values are those of the host's own modules. Used only without gradients, and only for
blocks whose linear layers are plain (`is_plain_linear`): others (wrapped, hooked, quantised, offloaded, sharded) are
called as they are.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dtem import ops
from dtem.hooks import are_untouched
from dtem.integrations.affine import tuned_class

PLAIN_LINEAR = (nn.Linear, tuned_class(nn.Linear))


class Linear(Protocol):
    """A linear layer: a module, or its parts (`fast_block.Parts`)."""

    weight: Any
    bias: Any

    def __call__(self, x: Tensor, /) -> Tensor: ...


class CpuWorkspace:
    """The buffer of one forward. The result of `linear` is valid until the next call."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """`layer(x)`, into the buffer."""
        weight, bias = layer.weight, layer.bias
        if not _fits(weight, bias, x):
            return layer(x)
        if ops.linear.serves(x):
            return ops.linear.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        shape = (rows.shape[0], weight.shape[0])
        needed = shape[0] * shape[1]
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = x.new_empty(needed)
        out = self._buffer[:needed].view(shape)
        torch.addmm(bias, rows, weight.t(), out=out)
        return out.view(*x.shape[:-1], shape[1])

    def gelu(self, layer: Linear, x: Tensor, approximate: str) -> Tensor:
        """GELU of `layer(x)`, into the buffer."""
        weight, bias = layer.weight, layer.bias
        if _fits(weight, bias, x) and ops.linear.serves(x):
            return ops.linear.linear_gelu(x, weight, bias, approximate)
        return torch.ops.aten.gelu_(self.linear(layer, x), approximate=approximate)

    def residual(self, x: Tensor, layer: Linear, y: Tensor) -> Tensor:
        """`x + layer(y)`, in one matrix product that accumulates into x + bias."""
        weight, bias = layer.weight, layer.bias
        if not _fits(weight, bias, y):
            return layer(y).add_(x)
        if ops.linear.serves(x):
            return ops.linear.linear_add(x, y, weight, bias)
        out = x.contiguous() + bias
        out.view(-1, out.shape[-1]).addmm_(y.reshape(-1, y.shape[-1]), weight.t())
        return out


def _fits(weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    return bias is not None and x.dtype == weight.dtype and weight.is_cpu


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
    if not x.is_cpu or (x.numel() < ops.linear.SMALL and not ops.linear.serves(x)):
        return None
    return None if torch.is_autocast_enabled("cpu") else CpuWorkspace()


def is_identity(module: nn.Module) -> bool:
    """Whether `module` returns its input. (At batch 1 such calls cost as much as small kernels.)"""
    kind = type(module)
    plain = kind is nn.Identity or (kind is nn.Dropout and not module.training)
    return plain and are_untouched(module)
