"""Rates that are learned: how many tokens every block removes, at a cost that stays what it was.

What an image costs is a sum over blocks. Of n tokens that attention sees, m reach the MLP; in GFLOPs (MACs) that is

    fixed + Σ a n + b n² + c m + [m < n] (d n + e n²)

with d and e for the method's own work. It has a gradient in the numbers of tokens, and so in the rates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from dtem import schedule as schedules
from dtem.types import DtemError, HostSpec

Plan = tuple[int, ...]
"""r of every block."""
Cost = Callable[[Plan], float]
"""GFLOPs (MACs) of the host by a plan, counted."""

TOKENS = 100.0
"""Tokens per unit of the learned parameter. AdamW moves every number by about the learning rate per update, however
large its gradient: at 1e-3, which is right for an embedding, a rate then moves by a tenth of a token."""


class LearnedRates(nn.Module):
    """One rate per block: r_l = start_l + TOKENS · offset_l, at least 0 and at most half of the patches left.

    They start from a whole plan, and what that plan costs is the budget.
    """

    start: Tensor
    prices: Tensor

    def __init__(self, host: HostSpec) -> None:
        super().__init__()
        self.host = host
        self.offset = nn.Parameter(torch.zeros(host.depth))
        self.register_buffer("start", torch.zeros(host.depth, dtype=torch.int64))
        self.register_buffer("prices", torch.zeros(6))

    def aim(self, plan: Plan, cost: Cost) -> None:
        """Start from `plan`, and keep to its cost."""
        with torch.no_grad():
            self.offset.zero_()
            self.start.copy_(torch.tensor(plan))
            self.prices.copy_(fitted(cost, plan, self.host))

    def forward(self) -> Float[Tensor, " l"]:
        """The rates as they are now."""
        left, rates = self.offset.new_tensor(self.host.patches), []
        for wanted in (self.start + TOKENS * self.offset).unbind():
            rates.append(_Bounded.apply(wanted, left / 2))
            left = left - rates[-1]
        return torch.stack(rates)

    def excess(self, rates: Float[Tensor, " l"]) -> Float[Tensor, ""]:
        """By how much more these rates cost than the budget, as a part of it; 0 while there is none."""
        budget = gflops(self.prices, self.start, self.host)
        return (gflops(self.prices, rates, self.host) - budget) / budget.clamp(min=1e-12)

    @torch.no_grad()
    def nearest(self) -> Plan:
        """The whole numbers next to the rates: what soft steps run at."""
        return self._clamp(self().tolist())

    @torch.no_grad()
    def whole(self) -> Plan:
        """The whole numbers for inference: as near to the rates as the budget allows, and never above it.

        All rates are raised or lowered alike until, rounded, they cost no more than the budget. Then those that were
        raised most give a token back, as far as the budget has room for it.
        """
        if self.offset.is_meta:
            raise DtemError("a model without weights (device meta) has learned no rates; give r as numbers")
        prices = self.prices.double().cpu()
        budget = gflops(prices, self.start.double().cpu(), self.host) * (1 + 1e-9)
        # blocks with equal rates step one after the other, the first ones first
        rates = [rate - 1e-6 * layer for layer, rate in enumerate(self().tolist())]

        def fits(plan: Plan) -> bool:
            return bool(gflops(prices, torch.tensor(plan, dtype=torch.float64), self.host) <= budget)

        low, high = -float(self.host.patches), float(self.host.patches)
        while high - low > 1e-9:
            middle = (low + high) / 2
            if fits(self._clamp([rate + middle for rate in rates])):
                high = middle
            else:
                low = middle
        plan = self._clamp([rate + high for rate in rates])
        for layer in sorted(range(len(plan)), key=lambda layer: rates[layer] - plan[layer]):
            less = (*plan[:layer], max(plan[layer] - 1, 0), *plan[layer + 1 :])
            plan = less if fits(less) else plan
        return plan

    def _clamp(self, rates: Sequence[float]) -> Plan:
        return schedules.clamp([max(round(rate), 0) for rate in rates], self.host.patches)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LearnedRates":
        """Rates keep their precision in a host of half precision: rounded twice, they might miss the budget."""

        def exact(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= tensor.dtype.itemsize else tensor.to(moved.device)

        super()._apply(exact, recurse)  # type: ignore[no-untyped-call]
        return self


class _Bounded(torch.autograd.Function):
    """x between 0 and `high`. Outside, the gradient still comes through where a step along it leads back inside; with
    a plain clamp, a rate that was once out would stay there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(x, high)
        return torch.minimum(x.clamp(min=0.0), high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, high = ctx.saved_tensors
        outwards = ((x <= 0) & (grad > 0)) | ((x >= high) & (grad < 0))
        return torch.where(outwards, 0.0, grad), torch.where(x > high, grad, 0.0)


def block_gflops(prices: Sequence[float] | Tensor, before: Tensor, after: Tensor) -> Tensor:
    """GFLOPs of blocks that attend to `before` tokens and hand `after` to their MLP. `prices`: a, b, c, d, e."""
    a, b, c, d, e = prices
    own = (after < before) * (d * before + e * before * before)
    return a * before + b * before * before + c * after + own


def gflops(prices: Float[Tensor, "6"], rates: Shaped[Tensor, " l"], host: HostSpec) -> Float[Tensor, ""]:
    """GFLOPs of an image of the host's own size at these rates. `prices`: fixed, a, b, c, d, e."""
    rates = rates.to(prices.dtype)
    after = host.patches + host.prefix - rates.cumsum(dim=0)
    return prices[0] + block_gflops(prices[1:], after + rates, after).sum()


def fitted(cost: Cost, plan: Plan, host: HostSpec) -> Float[Tensor, "6"]:
    """The prices by which a few plans cost what was counted: `plan`, and others that merge in one block or in all."""
    depth, most = host.depth, host.patches // 2
    steps = (most // (2 * depth) + 1, most // 4 + 1, most)
    asked = [[0] * depth, plan, *([r] * depth for r in steps)]
    asked += [[r * (block == layer) for block in range(depth)] for layer in (0, depth - 1) for r in steps]
    plans = sorted({schedules.clamp(one, host.patches) for one in asked})
    counted = torch.tensor([cost(one) for one in plans], dtype=torch.float64)
    tensors, units = torch.tensor(plans, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    paid = torch.stack([torch.stack([gflops(unit, one, host) for unit in units]) for one in tensors])
    size = paid.amax(dim=0).clamp(min=1.0)
    prices = torch.linalg.lstsq(paid / size, counted, driver="gelsd").solution / size
    if (error := ((paid @ prices) / counted - 1).abs().max().item()) > 2e-3:
        raise DtemError(
            f"the cost of {host.name} is no sum of equal blocks (off by {100 * error:.2g} %): no rates can be learned"
        )
    return prices
