"""DiffRate: prune and merge in every block, at rates that are learned.

Chen et al., "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers", ICCV 2023,
https://arxiv.org/abs/2305.17997. After the attention of a block, patches are ranked by the attention of the class token
(mean over heads). The last ones are pruned; the last of the rest are merged, each into the most similar remaining patch
(cosine of features): features are averaged, and the size grows by the merged size times the cosine.

*Rates.* Every block has two distributions over candidate counts of patches: p over the number kept by pruning, p' over
that kept by merging. Their means, rounded up and clamped to the remaining patches, are used. A patch of rank i is kept
with probability Σ p(counts above i), and its mask, 1 or 0, has the gradient of that probability (straight-through). In
training no patch is removed, and its attention weight is multiplied by its mask. The loss λ (GFLOPs of the learned
counts − budget)² pulls the rates to the budget; only the rates are trained.

Here the *schedule* is the budget: soft mode learns rates that cost as much as the schedule r (r = 16, 2.5G, …). The
learned rates are a schedule too: ``handle.r = "learned"``; training sets it at the end, and adapter files store it. At
inference any schedule can be used: the r tokens of a block are split into pruned and merged in the learned proportion.
Before training that is about one half each, and ``"learned"`` is about the same r in every block.

Differences from the publication:

* Rates are initialised with counts that fall linearly over the blocks, as the broadest distributions of that mean
  (published: uniform, half of the patches in every block). The first block is trained, too (there it keeps all).
* No block removes more than half of its patches, as in all schedules here. (Published schedules of class-token models
  drop nearly all in the last block, where only its MLP is saved; `shortcut` saves that here.)
* The budget counts blocks with an MLP ratio of 4, whatever the host's is, in both plans.
* A cosine below 0 adds 0 to a size; sizes are the same in training and at inference (published: at least 1 is added in
  training). There a masked patch attends to itself, which changes no output.

The published learning rate is 0.01.
"""

import dataclasses
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.base import MASKED, Config, Method, check_positive, full_size, is_count
from dtem.methods.cost_model import block_gflops
from dtem.ops.matching import full_precision, positions
from dtem.types import HostSpec, Taps, Tokens


@dataclasses.dataclass(frozen=True)
class DiffRateConfig(Config):
    """Settings of DiffRate."""

    proportional: bool | str | None = True
    """Proportional attention, on for every host as published. True, False, "train" or None."""
    step: int = 4
    """Step between candidate counts, in patches."""
    flops_weight: float = 5.0
    """λ of the budget loss, which is in GFLOPs squared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.step):
            raise DtemError(f"step = {self.step!r} must be a whole number, 1 or more")
        check_positive("flops_weight", self.flops_weight)


class DiffRate(Method):
    """Pruning and merging by class attention, with learned rates."""

    name: ClassVar[str] = "diffrate"
    needs: ClassVar[frozenset[str]] = frozenset({"class_token", "q", "k"})
    config_class: ClassVar[type[Config]] = DiffRateConfig
    config: DiffRateConfig
    conserves_size = False

    def __init__(self, host: HostSpec, config: DiffRateConfig) -> None:
        super().__init__(host, config)
        blocks = torch.arange(host.depth, dtype=torch.float64)
        counts = torch.arange(host.patches, 0, -config.step, dtype=torch.float64)

        def start(done: Tensor) -> nn.Parameter:
            """One dimension, since our optimisers apply weight decay to matrices."""
            return nn.Parameter(tilted(counts, host.patches * (1 - done / (host.depth + 1))).float().flatten())

        self.prune = start(blocks + 0.5)
        """Logits of the candidate counts, block by block."""
        self.merge = start(blocks + 1.0)

    def has_soft_mode(self) -> bool:
        return True

    def schedule(self) -> tuple[int, ...]:
        return tuple(pruned + merged for pruned, merged in self.rates())

    @torch.no_grad()
    def rates(self) -> tuple[tuple[int, int], ...]:
        """Learned numbers of pruned and merged patches of every block, at the host's own image size."""
        if self.prune.is_meta:
            raise DtemError("a model without weights (device meta) has learned no rates; give r as numbers")
        counts = stepwise(self._expected(self.host.patches)[1], self.host.patches)
        left, plan = counts.new_tensor(self.host.patches), []
        for count, share in zip(counts[:, 1], pruned_share(counts, self.host.patches), strict=True):
            middle, after = split(left, count, share)
            plan.append((int(left - middle), int(middle - after)))
            left = after
        return tuple(plan)

    def _expected(self, patches: int) -> tuple[Float[Tensor, "2 l k"], Float[Tensor, "l 2"]]:
        """Probabilities of the candidate counts, and the mean count of every block: of pruning, then of merging."""
        logits = torch.stack([self.prune, self.merge]).view(2, self.host.depth, -1)
        if logits.dtype != torch.float64:
            logits = logits.float()
        with full_precision(logits.device):
            chance = logits.softmax(dim=-1)
            return chance, (chance @ self._counts(patches, chance)).mT

    def _counts(self, patches: int, like: Tensor) -> Float[Tensor, " k"]:
        """The candidate counts for an image of `patches` patches."""
        counts = torch.arange(self.host.patches, 0, -self.config.step, dtype=like.dtype, device=like.device)
        return counts * (patches / self.host.patches)

    def bias(self, tokens: Tokens) -> Float[Tensor, "b n"] | None:
        if not self.soft or self.proportional:
            return super().bias(tokens)  # in soft mode, masks are part of the sizes
        keep = tokens.carry.get("keep")
        return None if keep is None else ops.log_size(self._padded(keep + MASKED))

    def _padded(self, value: Float[Tensor, "b p"]) -> Float[Tensor, "b n"]:
        return nn.functional.pad(value, (self.host.prefix, 0), value=1.0)

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        if r == 0 and not self.soft:
            return tokens
        attention = self.class_attention(tokens, taps)  # (b, n)
        return self._mask(layer, tokens, attention, r) if self.soft else self._drop(layer, tokens, attention, r)

    def _drop(self, layer: int, tokens: Tokens, attention: Float[Tensor, "b n"], r: int) -> Tokens:
        """The hard step. The number of pruned tokens stays on the device: shapes depend on r only."""
        prefix = self.host.prefix
        share = tokens.carry.get("share")
        if share is None:
            patches = self.host.patches
            share = pruned_share(stepwise(self._expected(patches)[1].detach(), patches), patches)
        kept, gone = ops.prune(attention, r, prefix)
        merged = positions(1, r, gone.device) < r - (share[layer] * r).round()  # (1, r): those of highest attention
        x, lost = ops.take(tokens.x, kept), ops.take(tokens.x, gone)
        near, into = ops.find_hosts(lost.detach(), x[:, prefix:].detach())
        size = full_size(tokens)
        extra = merged * near.clamp(min=0.0).to(size.dtype) * size.gather(1, gone)
        new_size = size.gather(1, kept).scatter_add(1, into + prefix, extra)
        weight = merged.expand_as(into).to(x.dtype)
        count = torch.ones_like(x[..., 0]).scatter_add(1, into + prefix, weight)
        rows = (into + prefix).unsqueeze(-1).expand_as(lost)
        x = x.scatter_add(1, rows, weight.unsqueeze(-1) * lost) / count.unsqueeze(-1)
        source = tokens.source
        if source is not None:
            step = ops.pruned_source(kept, gone, -1).scatter(1, gone, torch.where(merged, into + prefix, -1))
            source = ops.compose(source, step)
        return tokens.replace(x=x, size=new_size, source=source, carry={**tokens.carry, "share": share})

    def _mask(self, layer: int, tokens: Tokens, attention: Float[Tensor, "b n"], r: int) -> Tokens:
        """The soft step: pruned and merged patches stay, masked. The schedule's r only enters the budget."""
        prefix = self.host.prefix
        x, score = tokens.x[:, prefix:], attention[:, prefix:].detach()
        patches = x.shape[1]
        chance, expected = self._expected(patches)
        carry = tokens.carry or self._begin(score, expected)
        keep, size, left = carry["keep"], carry["size"], carry["left"]

        middle, after = split(left.detach(), carry["counts"][layer, 1], carry["share"][layer])
        order = torch.sort(score.masked_fill(keep == 0, -1.0), dim=1, descending=True, stable=True).indices
        rank = order.argsort(dim=1)
        above = self._counts(patches, chance).unsqueeze(1) > positions(1, patches, x.device)  # (k, p)
        held = chance[:, layer] @ above.to(chance.dtype)  # (2, p): probability that a rank is kept
        held = (held - held.detach()).to(score.dtype)
        gone = rank >= left
        keep = keep * (((rank < middle) | gone) + held[0][rank])
        keep = keep * (((rank < after) | (rank >= middle)) + held[1][rank])

        near, into = ops.find_hosts(x.detach(), x.detach(), (rank < after).unsqueeze(1))
        moves = ((rank >= after) & (rank < middle)).to(size.dtype)
        flow = nn.functional.one_hot(into, patches).to(size.dtype) * moves.unsqueeze(-1)  # (b, p, p): i goes into j
        size = size + (flow * (near.clamp(min=0.0) * size).unsqueeze(-1)).sum(dim=1)
        x = (x + flow.mT.to(x.dtype) @ x) / (1.0 + flow.sum(dim=1)).to(x.dtype).unsqueeze(-1)

        pushed = expected[layer].sum()  # both rates get the gradient of the count
        new_left = after + (pushed - pushed.detach())
        allowed = carry["allowed"]
        over = carry["over"] + self._cost(left, new_left) - self._cost(allowed, allowed - r)
        carry = {**carry, "keep": keep, "size": size, "left": new_left, "allowed": allowed - r, "over": over}
        x = torch.cat([tokens.x[:, :prefix], x], dim=1)
        return tokens.replace(x=x, size=self._padded(keep * size + MASKED), source=None, carry=carry)

    def _begin(self, like: Float[Tensor, "b p"], expected: Float[Tensor, "l 2"]) -> dict[str, Tensor]:
        """Initial state of the soft steps: masks and sizes of patches, counts to reach, remaining patches by the
        learned rates and by the schedule, and the GFLOPs by which the former exceed the latter."""
        patches = like.shape[1]
        counts = stepwise(expected.detach(), patches)
        left = counts.new_tensor(patches)
        ones = torch.ones_like(like)
        share = pruned_share(counts, patches)
        return {
            "keep": ones,
            "size": ones,
            "counts": counts,
            "share": share,
            "left": left,
            "allowed": left,
            "over": 0 * left,
        }

    def _cost(self, before: Tensor, after: Tensor) -> Tensor:
        """GFLOPs of a block with `before` patches in attention and `after` in its MLP."""
        width, prefix = self.host.width / 1e9, self.host.prefix
        coefficients = (4 * width * self.host.width, 2 * width, 8 * width * self.host.width, 0.0, 0.0)
        return block_gflops(coefficients, before + prefix, after + prefix)

    def losses(self, tokens: Tokens) -> dict[str, Tensor]:
        over = tokens.carry.get("over")
        return {} if over is None else {"flops": self.config.flops_weight * over.square()}


def tilted(counts: Float[Tensor, " k"], mean: Float[Tensor, " l"]) -> Float[Tensor, "l k"]:
    """Logits a·counts, one row per mean, whose softmax has that mean: the maximum-entropy distributions."""
    scaled = counts / counts.max()
    low, high = torch.full_like(mean, -64.0), torch.full_like(mean, 64.0)
    for _ in range(60):
        a = (low + high) / 2
        less = (a.unsqueeze(1) * scaled).softmax(dim=1) @ counts < mean
        low, high = torch.where(less, a, low), torch.where(less, high, a)
    return low.unsqueeze(1) * scaled


def stepwise(expected: Float[Tensor, "l 2"], patches: int) -> Float[Tensor, "l 2"]:
    """Integer counts: rounded up, and never above that of the step before."""
    return (expected - 1e-4).ceil().clamp(1, patches).flatten().cummin(dim=0).values.view_as(expected)


def pruned_share(counts: Float[Tensor, "l 2"], patches: int) -> Float[Tensor, " l"]:
    """Share of the removed patches of each block that is pruned, not merged; one half if it removes none."""
    before = nn.functional.pad(counts[:-1, 1], (1, 0), value=float(patches))
    removed = before - counts[:, 1]
    return torch.where(removed > 0, (before - counts[:, 0]) / removed.clamp(min=1.0), 0.5)


def split(left: Tensor, count: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Patches after pruning and after merging: `count`, but at least half of `left`."""
    after = torch.maximum(torch.minimum(left, count), left - (left / 2).floor())
    return left - (share * (left - after)).round(), after
