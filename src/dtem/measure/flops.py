"""Counting what a forward computes, by watching it run on tensors without data.

Two conventions:

* **MACs**: multiply-adds of matrix products and convolutions, as timm prints them.
* **paper**: the same plus one per added bias, scaling and residual entry, 1 per GELU, 4 per LayerNorm entry, 5 per
  softmax entry: what the counter behind the paper's tables adds up. For a Segmenter the paper's table has MACs, but for
  the attention products of the decoder (`Segmenter.paper_macs`).

Since what runs is what is counted, every host and every method is counted by the same code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from dtem import integrations
from dtem.errors import DtemError, first_line


@dataclass(frozen=True)
class Count:
    """Operations of one forward on one image."""

    macs: int
    paper: int


def count(model: nn.Module, image: tuple[int, ...]) -> Count:
    """Count one forward of `model` on one image of shape (channels, height, width), or a video (frames, …)."""
    counter = _Counter()
    logits_fn = integrations.as_logits_fn(model)
    # Not in inference mode, where composite operations reach the counter as one.
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        x = torch.empty(1, *image, device="meta", dtype=torch.float32)
        weights = {name: _without_data(tensor) for name, tensor in _state(logits_fn).items()}
        try:
            with counter:
                torch.func.functional_call(logits_fn, weights, (x,))
        except DtemError:
            raise
        except Exception as error:  # hooks, and tensors of other packages, raise errors of every kind
            raise DtemError(
                f"the operations of {type(model).__name__} cannot be counted: {_obstacle(model)} ({first_line(error)})"
            ) from error
    paper_macs = getattr(model, "paper_macs", None)  # a model for which the paper counts otherwise
    if paper_macs is not None:
        return Count(counter.macs, paper_macs(counter.macs, *image[1:]))
    return Count(counter.macs, counter.macs + counter.other)


def _obstacle(model: nn.Module) -> str:
    """The likeliest reason why a model cannot run on tensors without data, and the way out."""
    before = "count it, or set a budget, before that, or give r as a number or list"
    modules = list(model.modules())
    if any(map(integrations.is_fully_sharded, modules)):
        return f"it is sharded (fully_shard); {before}"
    if any(hasattr(module, "_hf_hook") for module in modules):
        return f"it is offloaded or dispatched (accelerate); {before}"
    hooked = (module for module in modules if module._forward_hooks or module._forward_pre_hooks)
    if hook := next(hooked, None):
        return f"a {type(hook).__name__} has a forward hook, which may fail on tensors without data; remove it to count"
    if replaced := next((module for module in modules if "forward" in module.__dict__), None):
        return f"a {type(replaced).__name__} has a forward of its own, which may fail on tensors without data"
    return f"it may be quantised or wrapped; {before}"


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, device="meta", dtype=dtype)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _mm(args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, int]:
    return out.numel() * args[0].shape[-1], 0


def _addmm(args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, int]:
    return out.numel() * args[1].shape[-1], out.numel()


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, int]:
    weight, bias = args[1], args[2]
    return out.numel() * math.prod(weight.shape[1:]), out.numel() if bias is not None else 0


def _each(cost: int) -> Callable[[tuple[Any, ...], torch.Tensor], tuple[int, int]]:
    def counted(args: tuple[Any, ...], out: Any) -> tuple[int, int]:
        first = out[0] if isinstance(out, tuple) else out
        return 0, cost * first.numel()

    return counted


aten = torch.ops.aten
_RULES: dict[Any, Callable[..., tuple[int, int]]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.native_layer_norm.default: _each(4),
    aten._softmax.default: _each(5),
    aten._safe_softmax.default: _each(5),
    aten.gelu.default: _each(1),
    aten.gelu_.default: _each(1),
    aten.add.Tensor: _each(1),
    aten.add_.Tensor: _each(1),
    aten.mul.Tensor: _each(1),
    aten.mul.Scalar: _each(1),
}


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = 0
        self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule is not None:
            macs, other = rule(args, out)
            self.macs += macs
            self.other += other
        return out
