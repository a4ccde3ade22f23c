"""Unmerging: every token that was merged gets a copy of the token that holds it."""

from jaxtyping import Float, Int
from torch import Tensor

from dtem.ops.matching import Matching
from dtem.ops.merging import take


def unmerge(x: Float[Tensor, "b m c"], matching: Matching | Int[Tensor, "b n"]) -> Float[Tensor, "b n c"]:
    """Undo one merge (given its matching), or any number of them (given a source map)."""
    return take(x, matching.source if isinstance(matching, Matching) else matching)
