"""Unmerging: every token that was merged gets a copy of the token that holds it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dtem.ops.matching import Matching
from dtem.ops.merging import take
from dtem.types import DtemError


def unmerge(x: Float[Tensor, "b m c"], matching: Matching | Int[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
    """Undo one merge (given its matching), or any number of them (given a source map in which no patch was dropped)."""
    if isinstance(matching, Matching):
        return take(x, matching.source)
    if not matching.is_meta and not torch.compiler.is_compiling() and bool((matching < 0).any()):
        raise DtemError(
            f"{int((matching < 0).sum())} of {matching.numel()} patches were dropped (−1 in the source map): no token "
            "holds them, so they cannot be brought back. Use a method that merges instead"
        )
    return take(x, matching)
