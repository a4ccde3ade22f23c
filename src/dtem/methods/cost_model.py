"""Cost model: the GFLOPs of a plan as a polynomial in the tokens of each block.

The cost of an image is a sum over blocks. With n tokens in attention and m in the MLP, it is in GFLOPs (MACs)

    fixed + Σ a n + b n² + c m + [m < n] (d n + e n²)

where d and e are for the method itself. The coefficients are fitted to counted plans.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dtem import schedule as schedules
from dtem.errors import DtemError
from dtem.types import HostSpec

Plan = tuple[int, ...]
"""r of every block."""
Cost = Callable[[Plan], float]
"""GFLOPs (MACs) of the host by a plan, counted."""


def block_gflops(coefficients: Sequence[float] | Tensor, before: Tensor, after: Tensor) -> Tensor:
    """GFLOPs of blocks with `before` tokens in attention and `after` in the MLP. `coefficients`: a, b, c, d, e."""
    a, b, c, d, e = coefficients
    own = (after < before) * (d * before + e * before * before)
    return a * before + b * before * before + c * after + own


def gflops(coefficients: Float[Tensor, "6"], rates: Shaped[Tensor, " l"], host: HostSpec) -> Float[Tensor, ""]:
    """GFLOPs of an image of the host's own size at these rates. `coefficients`: fixed, a, b, c, d, e."""
    rates = rates.to(coefficients.dtype)
    after = host.patches + host.prefix - rates.cumsum(dim=0)
    return coefficients[0] + block_gflops(coefficients[1:], after + rates, after).sum()


def fit(cost: Cost, plan: Plan, host: HostSpec) -> Float[Tensor, "6"]:
    """Coefficients fitted to the counted cost of `plan` and of plans that merge in one block or in all."""
    depth, most = host.depth, host.patches // 2
    steps = (most // (2 * depth) + 1, most // 4 + 1, most)
    candidates = [[0] * depth, plan, *([r] * depth for r in steps)]
    candidates += [[r * (block == layer) for block in range(depth)] for layer in (0, depth - 1) for r in steps]
    plans = sorted({schedules.clamp(one, host.patches) for one in candidates})
    counted = torch.tensor([cost(one) for one in plans], dtype=torch.float64)
    tensors, units = torch.tensor(plans, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    terms = torch.stack([torch.stack([gflops(unit, one, host) for unit in units]) for one in tensors])
    scale = terms.amax(dim=0).clamp(min=1.0)
    coefficients = torch.linalg.lstsq(terms / scale, counted, driver="gelsd").solution / scale
    if (error := ((terms @ coefficients) / counted - 1).abs().max().item()) > 2e-3:
        raise DtemError(
            f"the cost of {host.name} is not a sum over equal blocks (error {100 * error:.2g} %), so the cost of "
            "single images cannot be computed"
        )
    return coefficients
