"""Thresholds of similarity that meet a budget on average: every image merges what is alike in it.

They start where the same r in every block would cut: in each block, as many edges of all images together lie above
its threshold as that r takes. One number is then added to all of them, found by bisection, until the images cost what
they should. Costs are those of the tokens that each image is really left with.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import adapters
from dtem.adapters import Merger
from dtem.measure import lengths
from dtem.methods import Method
from dtem.methods.rates import Cost
from dtem.ops.matching import strongest
from dtem.schedule import PerLayer, Threshold
from dtem.types import DtemError, Taps, Tokens

NEVER = 2.0
"""A cosine that none exceeds: the threshold of blocks that do not merge."""
CLOSE = 1e-3
"""Part of the budget by which the mean may miss it, on the images that were calibrated on."""


def calibrate(
    model: nn.Module, merger: Merger, batches: Sequence[Tensor], gflops: float, start: PerLayer, cost: Cost
) -> tuple[Threshold, float]:
    """Thresholds at which the images of `batches` cost `gflops` on average, and what they cost then.

    `start` is the plan with the same r in every block that meets the budget, `cost` counts the GFLOPs of a plan.
    """
    host = merger.method.host
    if not any(start.values):
        raise DtemError(f"a budget of {gflops:g} GFLOPs merges nothing: the unmerged model takes no more itself")
    prices = lengths.prices_of(cost, host)
    merger.schedule = start
    first = quantiles(edges(model, merger.method, batches), start.values)

    def moved(offset: float) -> Threshold:
        return Threshold(tuple(NEVER if value is None else round(value + offset, 4) for value in first))

    def mean(offset: float) -> float:
        merger.schedule = moved(offset)
        return lengths.macs_at(prices, lengths.observed(model, batches), host).mean().item() / 1e9

    low, high, offset = -2.0, 2.0, 0.0
    step = 0.02
    while (found := mean(offset)) and abs(found / gflops - 1) > CLOSE and high - low > 1e-4:
        low, high = (offset, high) if found < gflops else (low, offset)
        # walk in growing steps until the budget lies between two numbers, then halve
        wide = high - low > 2.0
        offset = offset + (step if found < gflops else -step) if wide else (low + high) / 2
        step *= 2 if wide else 1
    return moved(offset), found


def edges(model: nn.Module, method: Method, batches: Sequence[Tensor]) -> list[Float[Tensor, "b i"] | None]:
    """For every block, the cosine of each A token with its best partner, for all images; None where nothing merges."""
    with _watching(method) as seen:
        for images in batches:
            with torch.no_grad():
                adapters.asked(model)(images)
    return [torch.cat(each) if each else None for each in seen]


def quantiles(found: Sequence[Float[Tensor, "b i"] | None], plan: Sequence[int]) -> list[float | None]:
    """For every block, the cosine that r edges per image exceed, over all images together."""
    cuts: list[float | None] = []
    for best, r in zip(found, plan, strict=True):
        if best is None or r == 0:
            cuts.append(None)
            continue
        ordered = best.flatten().sort(descending=True).values
        count = r * len(best)
        cuts.append(((ordered[count - 1] + ordered[min(count, len(ordered) - 1)]) / 2).item())
    return cuts


@contextlib.contextmanager
def _watching(method: Method) -> Iterator[list[list[Tensor]]]:
    """Collect the best edges of every block while the model runs."""
    seen: list[list[Tensor]] = [[] for _ in range(method.host.depth)]
    reduce = method.reduce

    def watched(layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r:
            metric: Tensor = method.metric(layer, taps)  # type: ignore[operator]  # adaptive methods have one
            seen[layer].append(strongest(metric, method.host.prefix)[0].cpu())
        return reduce(layer, tokens, taps, r)

    method.reduce = watched  # type: ignore[method-assign]  # of this object alone, and only for now
    try:
        yield seen
    finally:
        del method.reduce
