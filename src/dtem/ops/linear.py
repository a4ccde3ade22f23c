"""Linear layers at inference on a CPU by oneDNN, which can add bias, GELU or a residual in the product itself.

torch computes float32 products by MKL. For small features (batch 1) oneDNN is faster on the processors we measured, and
on those of AMD, for which MKL does not use its best code, for all features (docs/research/benchmarks.md).
"""

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dtem.hooks import is_plain_tensor

#: Features with fewer entries than this (1 MB) are taken to stay in the cache.
SMALL = 1 << 18


def serves(x: Tensor) -> bool:
    """Whether products of these features are faster by oneDNN. (Not with gradients, and not in a compiled graph.)"""
    small = x.numel() < SMALL or is_amd()
    return small and x.dtype == torch.float32 and x.is_cpu and is_plain_tensor(x) and is_available()


@functools.cache
def is_available() -> bool:
    """Whether this torch has oneDNN."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available


@functools.cache
def is_amd() -> bool:
    """Whether this is an AMD processor."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AuthenticAMD" in platform.processor()


def linear(
    x: Float[Tensor, "*batch c"], weight: Float[Tensor, "d c"], bias: Tensor | None
) -> Float[Tensor, "*batch d"]:
    """x Wᵀ + b."""
    out: Tensor = _pointwise()[0](x, weight, bias, "none", [], "")
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """GELU of x Wᵀ + b."""
    out: Tensor = _pointwise()[0](x, weight, bias, "gelu", [], approximate)
    return out


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x Wᵀ + b."""
    out: Tensor = _pointwise()[1](x, residual.contiguous(), weight, bias, "add")
    return out


@functools.cache
def _pointwise() -> tuple[Any, Any]:
    """The operators of torch: with something done to each entry, and with another tensor added."""
    packet = torch.ops.mkldnn._linear_pointwise
    return packet.default, packet.binary
