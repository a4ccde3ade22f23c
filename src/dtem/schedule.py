"""Reduction schedules: how many tokens each block removes. r is clamped here and nowhere else.

| schedule | Python | command line |
|---|---|---|
| the same r in every block | ``16`` | ``16`` |
| r on average, more at the front (−1) or at the back (1) | ``(16, -0.5)`` | ``16@-0.5`` |
| one r per block | ``[16, 16, 8, 0]`` | ``16/16/8/0`` |
| a share of the remaining patches | ``0.2`` | ``20%`` or ``0.2`` |
| as few as meet a budget of GFLOPs (MACs) | ``"2.5G"`` | ``2.5G`` |
| as few as reach a time of a batch here, measured by `dtem.tune` | ``"12ms"``, ``"40ms@16"`` (batch 16) | ``12ms`` |
| as few as reach a speed-up here, measured by `dtem.tune` | ``"1.8x"``, ``"1.8x@16"`` | ``1.8x`` |
| the plan that `dtem.tune` chose, kept in the adapter file | ``"tuned"`` | ``tuned`` |
| learned by the method (DiffRate) | ``"learned"`` | ``learned`` |
"""

import bisect
import math
import numbers
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dtem.errors import DtemError

FORMS = (
    "16 (every block), 16@-0.5 (inflected), 16/16/8/0 (one per block), 20% (share of the remaining patches), "
    "2.5G (budget), 12ms or 1.8x (measured by dtem tune), tuned (in the adapter), learned (by the method)"
)


@dataclass(frozen=True)
class Constant:
    """The same r in every block."""

    r: int

    def __post_init__(self) -> None:
        _check_count(self.r)

    def per_block(self, depth: int) -> list[int]:
        return [self.r] * depth

    def __str__(self) -> str:
        return str(self.r)


@dataclass(frozen=True)
class Inflected:
    """r on average; `inflect` from −1 (falls from 2r to 0) over 0 (constant) to 1 (rises from 0 to 2r)."""

    r: int
    inflect: float

    def __post_init__(self) -> None:
        _check_count(self.r)
        if not -1 <= self.inflect <= 1:
            raise DtemError(f"inflection {self.inflect} is outside -1 … 1")

    def per_block(self, depth: int) -> list[int]:
        low = int(self.r * (1.0 - self.inflect))
        high = 2 * self.r - low
        if depth == 1:
            return [self.r]
        return [low + (high - low) * layer // (depth - 1) for layer in range(depth)]

    def __str__(self) -> str:
        return f"{self.r}@{self.inflect!r}"


@dataclass(frozen=True)
class PerLayer:
    """One r per block."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        for value in self.values:
            _check_count(value)

    def per_block(self, depth: int) -> list[int]:
        if len(self.values) != depth:
            raise DtemError(
                f"the schedule {self} has {len(self.values)} entries, the model {depth} blocks: give one per block"
            )
        return list(self.values)

    def __str__(self) -> str:
        return "/".join(map(str, self.values))


@dataclass(frozen=True)
class Ratio:
    """The same share of the remaining patches in every block."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 0.5:
            raise DtemError(f"ratio {self.ratio:g} is outside 0 … 0.5: one block can merge at most half of its patches")

    def per_block(self, depth: int) -> list[float]:
        return [self.ratio] * depth

    def __str__(self) -> str:
        percent = f"{100 * self.ratio:g}"
        return f"{percent}%" if float(percent) / 100 == self.ratio else f"{self.ratio:.20f}"


@dataclass(frozen=True)
class Budget:
    """The least merging that brings the model down to `gflops` (MACs). `solve` gives one r per block."""

    gflops: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gflops) and self.gflops > 0):
            raise DtemError(f"a budget of {self.gflops} GFLOPs cannot be met; give a positive number such as 2.5G")

    def solve(
        self,
        patches: int,
        depth: int,
        cost: Callable[[tuple[int, ...]], float],
        at: Collection[int] | None = None,
        resets_each_block: bool = False,
    ) -> PerLayer:
        """The plan with the fewest removed tokens within the budget: r in every block, and r + 1 in the first few.

        Args:
            patches: of the image.
            depth: number of blocks.
            cost: GFLOPs of a plan. More removed tokens must cost less, so that bisection finds the plan.
            at: the blocks that may remove tokens; None: all.
            resets_each_block: as in `clamp`.
        """
        blocks = sorted(range(depth) if at is None else at)
        high = (patches // 2) * len(blocks)

        def plan(total: int) -> tuple[int, ...]:
            return even_plan(total, patches, depth, blocks, resets_each_block)

        unmerged = cost(plan(0))
        if unmerged < self.gflops:
            raise DtemError(
                f"a budget of {self.gflops:g} GFLOPs is more than the unmerged model takes ({unmerged:.3g}): nothing "
                "would be merged; give less"
            )
        if cost(plan(high)) > self.gflops:
            raise DtemError(
                f"a budget of {self.gflops:g} GFLOPs cannot be met: merging as much as possible leaves "
                f"{cost(plan(high)):.3g}"
            )
        total = bisect.bisect_left(range(high), True, key=lambda total: cost(plan(total)) <= self.gflops)
        return PerLayer(plan(total))

    def __str__(self) -> str:
        return f"{self.gflops!r}G"


def even_plan(
    total: int, patches: int, depth: int, blocks: Sequence[int], resets_each_block: bool = False
) -> tuple[int, ...]:
    """A plan that removes `total` tokens: r in each of `blocks`, and r + 1 in the first few."""
    every, extra = divmod(total, len(blocks))
    rates = {layer: every + (index < extra) for index, layer in enumerate(blocks)}
    return clamp([rates.get(layer, 0) for layer in range(depth)], patches, resets_each_block)


@dataclass(frozen=True)
class Latency:
    """The least merging that reaches a time of one batch, in milliseconds, or a speed-up over the unmerged model."""

    value: float
    unit: str
    """``ms`` or ``x``."""
    batch: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > (self.unit == "x")):
            example = "a speed-up above 1, such as 1.8x" if self.unit == "x" else "a positive time, such as 12ms"
            raise DtemError(f"{self} cannot be reached; give {example}")
        if self.batch < 1:
            raise DtemError(f"{self}: the batch size behind @ must be 1 or more")

    def limit(self, unmerged: float) -> float:
        """Seconds of a batch; `unmerged` is what the unmerged model takes."""
        return unmerged / self.value if self.unit == "x" else self.value / 1000

    def solve(
        self,
        patches: int,
        depth: int,
        seconds: Callable[[tuple[int, ...]], float],
        at: Collection[int] | None = None,
        resets_each_block: bool = False,
    ) -> PerLayer:
        """The plan with the fewest removed tokens that takes no longer, spread evenly as by `Budget.solve`."""
        blocks = sorted(range(depth) if at is None else at)
        plans = [even_plan(n, patches, depth, blocks, resets_each_block) for n in range(patches // 2 * len(blocks) + 1)]
        unmerged = seconds(plans[0])
        limit = self.limit(unmerged)
        if unmerged <= limit:
            raise DtemError(
                f"{self}: the unmerged model takes {1000 * unmerged:.3g} ms already; nothing would be merged"
            )
        for plan in plans[1:]:
            if seconds(plan) <= limit:
                return PerLayer(plan)
        fastest = min(map(seconds, plans))
        raise DtemError(
            f"{self} cannot be reached: merging as much as possible takes {1000 * fastest:.3g} ms, "
            f"{unmerged / fastest:.2f} times as fast as unmerged"
        )

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}" + (f"@{self.batch}" if self.batch != 1 else "")


@dataclass(frozen=True)
class Tuned:
    """The plan that `dtem.tune` chose for this model. A handle turns it into one r per block."""

    def __str__(self) -> str:
        return "tuned"


def check_stages(blocks: Collection[int], depth: int, share: float = 1.0) -> None:
    """Refuse blocks of a published schedule that the model does not have, and a share of tokens outside 0 … 1."""
    if not 0 < share <= 1:
        raise DtemError(f"a share of {share} is outside 0 … 1")
    if any(not 0 <= block < depth for block in blocks):
        raise DtemError(f"blocks {sorted(blocks)} are not all among the {depth} blocks 0 … {depth - 1}")


@dataclass(frozen=True)
class Front:
    """A schedule for the first `blocks` blocks only (`HostSpec.num_merge_blocks`). Its text is that of the schedule."""

    schedule: Constant | Inflected | Ratio
    blocks: int

    def per_block(self, depth: int) -> list[float]:
        return [*self.schedule.per_block(self.blocks), *[0] * (depth - self.blocks)]

    def __str__(self) -> str:
        return str(self.schedule)


@dataclass(frozen=True)
class Learned:
    """The r of every block that the method has learned. A handle turns it into one r per block."""

    def __str__(self) -> str:
        return "learned"


BlockRates = Constant | Inflected | PerLayer | Ratio | Front
"""Schedules that give the r of every block without a model."""
Schedule = BlockRates | Budget | Latency | Tuned | Learned


def parse(spec: object) -> Schedule:
    """Read a schedule in any of the forms of the table above."""
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, str):
        return _parse_text(spec)
    spec = _python_number(spec)
    if isinstance(spec, bool) or spec is None:
        raise DtemError(f"r = {spec!r} is not a schedule; write one of: {FORMS}")
    if isinstance(spec, int):
        return Constant(spec)
    if isinstance(spec, float):
        if spec.is_integer():
            return Constant(int(spec))
        return Ratio(spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray):
        values = tuple(map(_python_number, spec))
        if isinstance(spec, tuple) and len(values) == 2 and isinstance(values[1], float):
            return Inflected(*values)
        return PerLayer(values)
    raise DtemError(f"r = {spec!r} is not a schedule; write one of: {FORMS}")


def parse_list(r: object) -> list[str]:
    """Several schedules as text, each once: from a list or tuple of them, text with commas between, or one alone.

    One r per block is text here, ``"16/16/8/0"``, since a list means several schedules.
    """
    r = _python_number(r)
    specs = r.split(",") if isinstance(r, str) else r if isinstance(r, list | tuple) else [r]
    if not specs:
        raise DtemError(f"r = {r!r} holds no schedule; write one or more of: {FORMS}")
    schedules = [(spec, parse(spec)) for spec in specs]
    return list(dict.fromkeys(spec.strip() if isinstance(spec, str) else str(parsed) for spec, parsed in schedules))


def _python_number(value: Any) -> Any:
    """Numbers of other kinds (numpy's, torch's, fractions) as int or float, arrays as lists; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


def _parse_text(text: str) -> Schedule:
    body = text.strip()
    if body in ("learned", "tuned"):
        return Learned() if body == "learned" else Tuned()
    try:
        if match := re.fullmatch(r"([^@]+?)(ms|x)(?:@(\d+))?", body):
            return Latency(float(match[1]), match[2], int(match[3] or 1))
        if body.endswith("%"):
            return Ratio(float(body[:-1]) / 100)
        if body[-1:] in ("G", "g"):
            return Budget(float(body[:-1]))
        if "@" in body:
            r, inflect = body.split("@")
            return Inflected(int(r), float(inflect))
        if "/" in body:
            return PerLayer(tuple(int(part) for part in body.split("/")))
        return Ratio(float(body)) if "." in body else Constant(int(body))
    except DtemError:
        raise
    except ValueError:
        raise DtemError(f"r = {text!r} is not a schedule; write one of: {FORMS}") from None


def clamp(rates: Sequence[float], patches: int, resets_each_block: bool = False) -> tuple[int, ...]:
    """One integer r per block, at most half of the remaining patches. Fractions are shares of the remaining patches.

    `resets_each_block`: every block restores its tokens, so each starts with all patches.
    """
    plan = []
    for value in rates:
        r = min(value if isinstance(value, int) else int(value * patches), patches // 2)
        plan.append(r)
        patches -= 0 if resets_each_block else r
    return tuple(plan)


def resolve(schedule: Schedule, patches: int, depth: int, resets_each_block: bool = False) -> tuple[int, ...]:
    """The r of every block for an image of `patches` patches. `resets_each_block` as in `clamp`."""
    if isinstance(schedule, Budget):
        raise DtemError(f"the budget {schedule} must be solved for a host first (dtem.patch does that)")
    if isinstance(schedule, Latency | Tuned | Learned):
        raise DtemError(f"the schedule {schedule} must be resolved by a handle first (dtem.patch does that)")
    return clamp(schedule.per_block(depth), patches, resets_each_block)


def for_first_blocks(schedule: Schedule, blocks: int | None) -> Schedule:
    """Restrict a schedule to the first `blocks` blocks (None: all), unless it gives one r per block."""
    if blocks is None or not isinstance(schedule, Constant | Inflected | Ratio):
        return schedule
    return Front(schedule, blocks)


def check(schedule: Schedule, patches: int, depth: int, at: Collection[int] | None = None) -> None:
    """Refuse a schedule that removes more than half of all patches in one block, or tokens outside the blocks `at`."""
    if isinstance(schedule, Budget | Latency | Tuned | Learned):
        return
    rates = schedule.per_block(depth)
    outside = [layer for layer, r in enumerate(rates) if r and at is not None and layer not in at]
    if outside:
        assert at is not None
        listed = ", ".join(map(str, sorted(at)))
        example = "/".join("8" if layer in at else "0" for layer in range(depth))
        raise DtemError(
            f"r = {schedule} would remove tokens in block {outside[0]}, but this method can in blocks {listed} only: "
            f"give one r per block, such as {example}, or a budget such as 2.5G"
        )
    if isinstance(schedule, Ratio):
        return
    largest = max(rates, default=0)
    if largest > patches // 2:
        raise DtemError(
            f"r = {largest} is more than half of the model's {patches} patches; one block can merge at most "
            f"{patches // 2}. Choose r <= {patches // 2}."
        )


def tokens(plan: Sequence[int], patches: int, prefix: int) -> tuple[int, ...]:
    """Number of tokens after each block."""
    left, counts = patches + prefix, []
    for r in plan:
        left -= r
        counts.append(left)
    return tuple(counts)


def _check_count(r: object) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r < 0:
        raise DtemError(f"r = {r!r} must be a whole number of tokens, 0 or more")
