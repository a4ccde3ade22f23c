"""Blocks of hosts that need every patch: merging before attention and MLP, unmerging after each (`methods.dense`)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtem import ops
from dtem.integrations.recording import Trace
from dtem.methods.dense import DenseMethod, Grouped
from dtem.types import Tokens

Component = tuple[nn.Module, Callable[[Grouped], Tensor]]
"""A norm, and the attention or MLP after it, as a function of its merged input."""


def run_block(
    method: DenseMethod,
    layer: int,
    components: tuple[Component, Component],
    r: int,
    trace: Trace | None,
    merge_candidates: list[ops.MergeCandidates],
    x: Tensor,
    in_place: bool = False,
) -> Tensor:
    """One block, in the steps of `methods.dense`. Candidates of the Fisher loss are added to `merge_candidates`."""
    for index, (norm, component) in enumerate(components):
        grouped = method.group(2 * layer + index, norm(x), r)
        if trace is not None:
            trace.record(_recorded(method, grouped))
        if grouped.candidates is not None:
            merge_candidates.append(grouped.candidates)
        y = method.ungroup(component(grouped), grouped)
        x = y.add_(x) if in_place else x + y
    return x


def _recorded(method: DenseMethod, grouped: Grouped) -> Tokens:
    """The tokens that a trace records of one component, two of each block."""
    x, size, matching, edges, _ = grouped
    source = None
    if matching is None:
        source = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    elif edges is None:
        source = matching.source
    return Tokens(x, size, None if source is None else source[:, method.host.prefix :])
