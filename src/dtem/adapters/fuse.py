"""Two linear layers on one input as one product, without a second copy of their weights.

`share` lays the weights of both layers out in one piece of memory; the parameters themselves become views of it, so a
change to either (an optimiser step, `load_state_dict`) is a change to what the product reads: nothing can be stale.
`project` uses the piece where it finds it and falls back to two products wherever it does not (after a move to another
device, under autograd, in a compiled graph).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def share(first: nn.Linear, second: nn.Linear) -> None:
    """Lay `second`'s weight and bias behind `first`'s. Layers that do not fit together are left alone."""
    pairs = [(first.weight, second.weight), (first.bias, second.bias)]
    if any(a is None or b is None or not _alike(a, b) or _adjacent(a, b) for a, b in pairs):
        return
    for a, b in pairs:
        both = torch.cat([a, b])
        a.data, b.data = both[: len(a)], both[len(a) :]


@torch.no_grad()
def separate(first: nn.Linear) -> None:
    """Give `first` a memory of its own again."""
    for tensor in (first.weight, first.bias):
        if tensor is not None and tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone()


def project(first: nn.Linear, second: nn.Linear | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`first(x)` and `second(x)`; the second is None where it is left to the caller."""
    if (
        second is None
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or first.bias is None
        or not (_adjacent(first.weight, second.weight) and _adjacent(first.bias, second.bias))
    ):
        return first(x), None
    both = F.linear(x, _span(first.weight, second.weight), _span(first.bias, second.bias))
    return both[..., : first.out_features], both[..., first.out_features :]


def _span(a: Tensor, b: Tensor) -> Tensor:
    return a.as_strided((len(a) + len(b), *a.shape[1:]), a.stride())


def _adjacent(a: Tensor, b: Tensor) -> bool:
    """Whether `b` begins where `a` ends, in the same memory."""
    return (
        a.device.type != "meta"
        and a.data_ptr() + a.nbytes == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.is_contiguous()
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.shape[1:] == b.shape[1:] and a.device.type != "meta"
