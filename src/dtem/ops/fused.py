"""Matching and merging as one custom operator, `dtem::merge`, for exporters that have their own implementation of it.

Under `with fused_merge_op():` a traced graph holds this operator instead of the many small ones of `match` and `merge`.
`dtem.exporters` translates it to ONNX. Graphs traced without it run without dtem.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch import Tensor

from dtem.ops.merging import match_and_merge

_fused: contextvars.ContextVar[bool] = contextvars.ContextVar("dtem_fused_merge", default=False)


@contextlib.contextmanager
def fused_merge_op() -> Iterator[None]:
    """Trace every merge as one operator."""
    token = _fused.set(True)
    try:
        yield
    finally:
        _fused.reset(token)


def is_fused_merge() -> bool:
    """Whether a graph is being exported under `fused_merge_op`. (Dynamo cannot read context variables: False there.)"""
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch.compiler.is_exporting() and _fused.get()


@torch.library.custom_op("dtem::merge", mutates_args=())
def fused_merge(
    x: Tensor, size: Tensor | None, metric: Tensor, images: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """`merge(x, size, match(metric, r, prefix))`; `images` (b) is 0, 1, 2, …: the index of each image."""
    return match_and_merge(x, size, metric, r, prefix)


@fused_merge.register_fake
def _shapes(
    x: Tensor, size: Tensor | None, metric: Tensor, images: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    batch, tokens, width = x.shape
    return x.new_empty(batch, tokens - r, width), x.new_empty(batch, tokens - r, dtype=torch.float32)
