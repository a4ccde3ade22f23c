"""The plan with the least divergence within a cost.

Plans differ from the best one so far in a block or two, so a forward starts behind the last block in which they agree,
from tokens that are kept. The search starts from plans of many shapes (even, rising, falling, every second or third
block), each scaled to the cost. Then, in steps that become smaller, it asks for every block what merging a little more
or less there changes in divergence and in cost, and moves tokens from the blocks where they harm most to those where
they harm least.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dtem import integrations
from dtem.data.labels import num_classes
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.integrations.replay import Replay
from dtem.schedule import PerLayer, clamp
from dtem.tasks.running import eval_mode
from dtem.types import HostSpec, Tokens

Plan = tuple[int, ...]
Cost = Callable[[Sequence[int]], float]
SLOPE_IMAGES, CANDIDATE_IMAGES = 32, 96
"""Images that slopes and the likeliest candidates are judged on; the last choice is made on all."""
PAIRS = 3
"""Blocks that tokens are taken from, and given to, in the candidates of a step; and the likeliest candidates."""


class Divergence:
    """Divergence of plans from the unmerged model, image by image.

    KL divergence of the logits; for a model without a classifier one minus the cosine of its features.
    """

    def __init__(self, handle: Handle, batches: Iterable[Tensor]) -> None:
        self.handle = handle
        self.forward = integrations.as_logits_fn(handle.model)
        self.classifies = bool(num_classes(handle.model))
        weight = next(handle.model.parameters())
        self.batches = [images.to(weight.device, weight.dtype) for images in batches]
        if not self.batches:
            raise DtemError("there are no images to compare plans on: give at least one")
        with torch.inference_mode(), eval_mode(handle.model), handle.at(r=0):
            self.expected = [self._normalised(self.forward(images)) for images in self.batches]

    @property
    def kind(self) -> str:
        """What is measured, for tables."""
        return "KL" if self.classifies else "1 − cosine"

    def _normalised(self, out: Tensor) -> Tensor:
        return F.log_softmax(out.float(), dim=-1) if self.classifies else F.normalize(out.float(), dim=-1)

    def _chunks(self, images: int | None) -> int:
        """Number of the first batches that hold so many images."""
        if images is None:
            return len(self.batches)
        return min(len(self.batches), -(-images // len(self.batches[0])))

    def of(
        self, plan: Plan, images: int | None = None, start: int = 0, known: "States | None" = None
    ) -> tuple[Tensor, "States"]:
        """Divergence of every image, and the tokens after every block.

        Args:
            plan: one r per block.
            images: about so many; None: all.
            start: the first block to run …
            known: … on the tokens that another plan, which agrees up to there, had before it.
        """
        values, states = [], []
        count = self._chunks(images)
        if not any(plan):
            return torch.zeros(sum(len(batch) for batch in self.batches[:count])), States([], 0)
        merger = self.handle.merger
        with torch.inference_mode(), eval_mode(self.handle.model), self.handle.at(r=PerLayer(plan)):
            for index in range(count):
                tokens = None if known is None or start == 0 else known.before(index, start)
                merger.replay = Replay(0 if tokens is None else start, tokens)
                try:
                    out = self._normalised(self.forward(self.batches[index]))
                    states.append(merger.replay.after)
                finally:
                    merger.replay = None
                expected = self.expected[index]
                if self.classifies:
                    values.append((expected.exp() * (expected - out)).sum(dim=-1))
                else:
                    values.append(1 - (expected * out).sum(dim=-1))
        return torch.cat(values).cpu(), States(states, 0 if known is None else start)

    def mean(self, plan: Plan, images: int | None = None, start: int = 0, known: "States | None" = None) -> float:
        """Mean of `of`."""
        return float(self.of(plan, images, start, known)[0].mean())


@dataclasses.dataclass(frozen=True)
class States:
    """Tokens after the blocks from `first` on, by batch."""

    after: list[list[Tokens]]
    first: int

    def before(self, batch: int, block: int) -> Tokens | None:
        """Tokens that enter a block; None where they are not kept."""
        index = block - 1 - self.first
        return self.after[batch][index] if 0 <= index < len(self.after[batch]) else None


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search knows."""

    divergence: Divergence
    cost: Cost
    host: HostSpec
    blocks: tuple[int, ...]
    """Those that may merge."""
    resets_each_block: bool = False
    progress: Callable[[int], object] = lambda count: None

    def run(self, limit: float, more: Iterable[Plan] = ()) -> Plan:
        """The best plan that costs no more than `limit`; `more` are plans to start from too, scaled to the limit."""
        shapes = [*self.shapes(), *(tuple(float(r) for r in plan) for plan in more)]
        seeds = [plan for shape in shapes if (plan := self.scaled(shape, limit)) is not None]
        if not seeds:
            raise DtemError("no plan is that fast: even merging as much as possible is slower. Ask for less")
        ranked = sorted((self._mean(plan, SLOPE_IMAGES), plan) for plan in dict.fromkeys(seeds))
        best = min((self._mean(plan, CANDIDATE_IMAGES), plan) for _, plan in ranked[:3])
        step = max(1, self.host.patches // 12)
        while step >= max(1, self.host.patches // 64):
            better = self._step(*best, step, limit)
            if better is None:
                step //= 2
            else:
                best = better
        return best[1]

    def shapes(self) -> list[tuple[float, ...]]:
        """Shares of merging by block."""
        depth, last = self.host.depth, max(self.blocks)

        def only(chosen: Collection[int], weight: Callable[[int], float] = lambda layer: 1.0) -> tuple[float, ...]:
            return tuple(weight(layer) if layer in chosen else 0.0 for layer in range(depth))

        rest = [layer for layer in self.blocks if layer != last] or list(self.blocks)
        spaced = [rest[first::every] for every in (2, 3, 4) for first in (0, 1)]
        falling = only(rest, lambda layer: 1.0 - layer / depth)
        rising = only(rest, lambda layer: (1.0 + layer) / depth)
        halves = [rest[: len(rest) // 2], rest[len(rest) // 4 :], rest[: -(len(rest) // 4) or None]]
        return [only(self.blocks), only(rest), falling, rising, *map(only, halves), *map(only, spaced)]

    def scaled(self, shape: Sequence[float], limit: float) -> Plan | None:
        """The least plan of this shape within the limit; None if there is none."""
        for total in range(1, self.host.patches * 2):
            plan = self.clamped([round(total * share / max(sum(shape), 1e-9)) for share in shape])
            if self.cost(plan) <= limit:
                return plan
        return None

    def clamped(self, rates: Sequence[int]) -> Plan:
        return clamp([max(0, r) for r in rates], self.host.patches, self.resets_each_block)

    def _mean(self, plan: Plan, images: int, start: int = 0, known: States | None = None) -> float:
        self.progress(1)
        return self.divergence.mean(plan, images, start, known)

    def _step(self, value: float, plan: Plan, step: int, limit: float) -> tuple[float, Plan] | None:
        """The best plan one step away, if it is better."""
        now, states = self.divergence.of(plan, SLOPE_IMAGES)
        here, cost = float(now.mean()), self.cost(plan)
        less: list[tuple[float, int]] = []
        more: list[tuple[float, int]] = []
        for layer in self.blocks:
            for change, slopes in ((-step, less), (step, more)):
                other = self.changed(plan, layer, change)
                saved = cost - self.cost(other)
                if other == plan or (change > 0 and saved <= 0):
                    continue
                difference = self._mean(other, SLOPE_IMAGES, layer, states) - here
                slopes.append((difference / abs(saved) if saved else difference * 1e9, layer))
        candidates = {self.changed(plan, layer, -step) for _, layer in sorted(less)[:PAIRS]}
        for _, source in sorted(less)[:PAIRS]:
            for _, layer in sorted(more)[: PAIRS + 1]:
                for taken in {step, plan[source]}:
                    if source != layer and (moved := self.filled(self.changed(plan, source, -taken), layer, limit)):
                        candidates.add(moved)
        ahead = max(len(less) // 2, 1), max(len(more) // 2, 1)
        several = plan
        for _, layer in sorted(less)[: ahead[0]]:
            several = self.changed(several, layer, -step // 2)
        for _, layer in sorted(more)[: ahead[1]]:
            if self.cost(several) > limit:
                several = self.filled(several, layer, limit, step) or self.changed(several, layer, step)
        candidates.add(several)
        within = [each for each in candidates if each != plan and any(each) and self.cost(each) <= limit]
        likely = sorted((self._mean(each, SLOPE_IMAGES, _agreeing(plan, each), states), each) for each in within)[
            :PAIRS
        ]
        found = min(((self._mean(each, CANDIDATE_IMAGES), each) for _, each in likely), default=None)
        return found if found is not None and found[0] < value else None

    def changed(self, plan: Plan, layer: int, change: int) -> Plan:
        """The plan with more or less in one block."""
        return self.clamped([r + change * (index == layer) for index, r in enumerate(plan)])

    def filled(self, plan: Plan, layer: int, limit: float, most: int | None = None) -> Plan | None:
        """The plan with as much more in one block as the limit needs."""
        for extra in range((most or self.host.patches) + 1):
            other = self.changed(plan, layer, extra)
            if self.cost(other) <= limit:
                return other
            if extra and other[layer] < plan[layer] + extra:
                return None
        return None


def _agreeing(plan: Plan, other: Plan) -> int:
    """Number of first blocks in which two plans agree."""
    return next((layer for layer, (a, b) in enumerate(zip(plan, other, strict=True)) if a != b), len(plan))
