"""What images cost where each is left with a number of tokens of its own."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dtem.methods.rates import Cost, block_gflops, fitted
from dtem.types import HostSpec


def prices_of(cost: Cost, host: HostSpec) -> Float[Tensor, "6"]:
    """Prices of tokens, for `macs_at`. `cost` counts the GFLOPs of a plan, in whichever convention."""
    return fitted(cost, (1,) * host.depth, host)


def macs_at(prices: Float[Tensor, "6"], tokens: Shaped[Tensor, "b l"], host: HostSpec) -> Float[Tensor, " b"]:
    """Operations of each image of the host's own size, from the tokens that it has left after every block."""
    after = tokens.to(prices.dtype)
    first = after.new_full((len(after), 1), host.patches + host.prefix)
    before = torch.cat([first, after[:, :-1]], dim=1)
    return 1e9 * (prices[0] + block_gflops(prices[1:], before, after).sum(dim=1))
