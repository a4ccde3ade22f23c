"""What images cost where each is left with a number of tokens of its own."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dtem import adapters
from dtem.methods.rates import Cost, block_gflops, fitted
from dtem.types import DtemError, HostSpec


def prices_of(cost: Cost, host: HostSpec) -> Float[Tensor, "6"]:
    """Prices of tokens, for `macs_at`. `cost` counts the GFLOPs of a plan, in whichever convention."""
    return fitted(cost, (1,) * host.depth, host)


def macs_at(prices: Float[Tensor, "6"], tokens: Shaped[Tensor, "b l"], host: HostSpec) -> Float[Tensor, " b"]:
    """Operations of each image of the host's own size, from the tokens that it has left after every block."""
    after = tokens.to(prices.dtype)
    first = after.new_full((len(after), 1), host.patches + host.prefix)
    before = torch.cat([first, after[:, :-1]], dim=1)
    return 1e9 * (prices[0] + block_gflops(prices[1:], before, after).sum(dim=1))


def counted(trace: adapters.Trace) -> Int[Tensor, "b l"]:
    """Tokens that every image of one traced forward had after each block; padding (size 0) is none."""
    return torch.stack([(size > 0).sum(dim=1) for size in trace.sizes], dim=1).cpu()


def observed(model: nn.Module, batches: Iterable[Tensor]) -> Int[Tensor, "b l"]:
    """`counted` over several batches of images; nothing is learned."""
    found = []
    for images in batches:
        with torch.no_grad(), adapters.tracing() as trace:
            adapters.asked(model)(images)
        found.append(counted(trace))
    if not found:
        raise DtemError("there are no images to count on: give one batch or more")
    return torch.cat(found)


def first_within(budget: float, count: int, cost: Callable[[int], float]) -> int:
    """Of `count` choices from mild to strong, the first that costs no more than `budget`; the last, if none does.

    Costs are taken to fall from one to the next, so that bisection finds it.
    """
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if cost(middle) > budget:
            low = middle + 1
        else:
            high = middle
    return low
