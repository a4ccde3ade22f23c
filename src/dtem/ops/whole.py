"""Matching and merging as one operator, `dtem::merge`, for whoever has a form of their own for it.

`with whole():` a traced graph holds that operator instead of the many small ones that `match` and `merge` are made of.
`dtem.export` translates it for ONNX; a graph that is traced outside needs nothing of dtem to run.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch import Tensor

from dtem.ops.matching import match
from dtem.ops.merging import merge

_whole: contextvars.ContextVar[bool] = contextvars.ContextVar("dtem_whole", default=False)


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Trace merges as one operator each."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def is_whole() -> bool:
    """Whether a graph is being traced under `whole`. (Dynamo, which cannot look at a context, traces none of those.)"""
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch.compiler.is_exporting() and _whole.get()


@torch.library.custom_op("dtem::merge", mutates_args=())
def merge_whole(
    x: Tensor, size: Tensor | None, metric: Tensor, images: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """`merge(x, size, match(metric, r, prefix))`; `images` (b) counts the images from 0."""
    return merge(x, size, match(metric, r, prefix))


@merge_whole.register_fake
def _shapes(
    x: Tensor, size: Tensor | None, metric: Tensor, images: Tensor, r: int, prefix: int
) -> tuple[Tensor, Tensor]:
    batch, tokens, width = x.shape
    return x.new_empty(batch, tokens - r, width), x.new_empty(batch, tokens - r, dtype=torch.float32)
