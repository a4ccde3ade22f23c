"""Inference on CPU: memory that is used again, and products that take bias, activation and residual along.

Most of what a ViT block computes goes into large new buffers, and on CPU a new buffer costs page faults: out of place,
GELU takes three times as long as in place. `Lean` lives for one forward and keeps one buffer for its largest products
(qkv, then the MLP's hidden layer, block after block); activations and residuals are computed in place. Features that
stay in the cache anyway (batch 1) have another cost, passes over them: there, oneDNN adds bias, GELU or residual while
it computes the product. Only where no gradient is asked for and nobody looks on (no hooks): the values are those of the
host's own modules.
"""

import torch
from torch import Tensor, nn

#: Features with fewer entries than this (1 MB) stay in the cache.
SMALL = 1 << 18


class Lean:
    """The buffer of one forward. What `linear` returns is valid until it is called again."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """`layer(x)`, into the buffer."""
        if not _plain(layer, x):
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
        if _plain(layer, x) and _small(x):
            return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], approximate)
        return torch.ops.aten.gelu_(self.linear(layer, x), approximate=approximate)

    def residual(self, x: Tensor, layer: nn.Linear, y: Tensor) -> Tensor:
        """`x + layer(y)`; the product is added to x + bias by the matrix product itself."""
        if not _plain(layer, y):
            return layer(y).add_(x)
        if _small(x):
            return torch.ops.mkldnn._linear_pointwise.binary(y, x.contiguous(), layer.weight, layer.bias, "add")
        out = x.contiguous() + layer.bias
        out.view(-1, out.shape[-1]).addmm_(y.reshape(-1, y.shape[-1]), layer.weight.t())
        return out


def _plain(layer: nn.Module, x: Tensor) -> bool:
    return type(layer) is nn.Linear and layer.bias is not None and x.dtype == layer.weight.dtype


def begin(x: Tensor) -> Lean | None:
    """A `Lean` for this forward, or None where it gains nothing or where gradients, a compiler or autocast ask for
    plain operations."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if x.device.type != "cpu" or (x.numel() < SMALL and not _small(x)):
        return None
    return None if torch.is_autocast_enabled("cpu") else Lean()


def _small(x: Tensor) -> bool:
    """Whether oneDNN computes products of these features: they are few, and it is there."""
    return x.numel() < SMALL and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def hooked(*modules: nn.Module) -> bool:
    """Whether somebody looks at what one of these modules takes or gives."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def idle(module: nn.Module) -> bool:
    """Whether calling `module` would do nothing. (At batch 1 such calls cost as much as small kernels.)"""
    kind = type(module)
    return (kind is nn.Identity or (kind is nn.Dropout and not module.training)) and not hooked(module)
