"""What is recorded of forwards: which patches are merged, and auxiliary losses."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from dtem import ops
from dtem.types import Tokens


@dataclasses.dataclass
class Trace:
    """Which patches were merged, block by block, in the forwards under `handle.trace()`."""

    sources: list[Tensor] = dataclasses.field(default_factory=list)
    """Source map after each block, (b, p): for each patch (row by row) the index of its token, −1 if dropped."""
    sizes: list[Tensor] = dataclasses.field(default_factory=list)
    """Token sizes after each block, (b, n): the number of patches in each token."""

    def record(self, tokens: Tokens) -> None:
        """Add the tokens after one block."""
        if tokens.source is not None:
            self.sources.append(tokens.source)
        size = tokens.size
        self.sizes.append(torch.ones_like(tokens.x[..., 0]) if size is None else size.detach())


class AuxiliaryLosses(dict[str, Tensor]):
    """Auxiliary losses of a method, by name, from one soft forward."""

    merge_candidates: tuple[ops.MergeCandidates, ...] = ()
    """With ``fisher=True``: the input of the Fisher loss (`ops.fisher_loss`)."""


R = TypeVar("R")
Recorders = dict[int, tuple[int, R]]
"""Active traces or losses of one model, oldest first: by their id, with the thread that opened them."""


@contextlib.contextmanager
def recording(recorders: Recorders[R], recorder: R) -> Iterator[R]:
    """Add `recorder` to the active ones, for a while."""
    recorders[id(recorder)] = threading.get_ident(), recorder
    try:
        yield recorder
    finally:
        del recorders[id(recorder)]


def current_recorder(recorders: Recorders[R]) -> R | None:
    """The newest recorder of this thread, else the newest of all."""
    if not recorders:
        return None
    active = list(recorders.values())
    own = [recorder for thread, recorder in active if thread == threading.get_ident()]
    return own[-1] if own else active[-1][1] if active else None
