"""Reduction schedules: how many tokens each block removes. r is clamped here and nowhere else.

| schedule | Python | command line |
|---|---|---|
| the same r in every block | ``16`` | ``16`` |
| r on average, more at the front (−1) or at the back (1) | ``(16, -0.5)`` | ``16@-0.5`` |
| one r per block | ``[16, 16, 8, 0]`` | ``16/16/8/0`` |
| a share of the patches left | ``0.2`` | ``20%`` or ``0.2`` |
| as much as meets a budget of GFLOPs (MACs) | ``"2.5G"`` | ``2.5G`` |
| what the method has learned | ``"learned"`` | ``learned`` |
| as many as have an edge with a cosine above a threshold; or one per block | ``"t0.8"`` | ``t0.9/0.8/0.8/0.7`` |
| the thresholds that `handle.calibrate` found | ``"adaptive"`` | ``adaptive`` |

With thresholds r differs from image to image (of a batch, the mean is taken); half of the patches at most.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dtem.types import Above, DtemError

FORMS = (
    "16 (every block), 16@-0.5 (inflected), 16/16/8/0 (one per block), 20% (share of what is left), 2.5G (budget), "
    "learned (by the method), t0.8 (edges above a cosine), adaptive (calibrated)"
)


@dataclass(frozen=True)
class Constant:
    """The same r in every block."""

    r: int

    def __post_init__(self) -> None:
        _check_count(self.r)

    def wanted(self, depth: int) -> list[int]:
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

    def wanted(self, depth: int) -> list[int]:
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

    def wanted(self, depth: int) -> list[int]:
        if len(self.values) != depth:
            raise DtemError(
                f"the schedule {self} has {len(self.values)} entries, the model {depth} blocks: give one per block"
            )
        return list(self.values)

    def __str__(self) -> str:
        return "/".join(map(str, self.values))


@dataclass(frozen=True)
class Ratio:
    """A share of the patches left, in every block."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 0.5:
            raise DtemError(f"ratio {self.ratio:g} is outside 0 … 0.5: one block can merge at most half of its patches")

    def wanted(self, depth: int) -> list[float]:
        return [self.ratio] * depth

    def __str__(self) -> str:
        percent = f"{100 * self.ratio:g}"
        return f"{percent}%" if float(percent) / 100 == self.ratio else f"{self.ratio:.20f}"


@dataclass(frozen=True)
class Budget:
    """As much merging as brings the model down to `gflops` (MACs). `solve` turns it into one r per block."""

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
        afresh: bool = False,
    ) -> PerLayer:
        """The mildest plan within the budget: r in every block (of those `at`), and one more in the first few.

        `cost` gives the GFLOPs of a plan. Plans are ordered by tokens removed, so that bisection finds the first.
        `afresh` as in `clamp`.
        """
        most = patches // 2
        blocks = sorted(range(depth) if at is None else at)

        def plan(total: int) -> tuple[int, ...]:
            every, extra = divmod(total, len(blocks))
            wanted = {layer: every + (index < extra) for index, layer in enumerate(blocks)}
            return clamp([wanted.get(layer, 0) for layer in range(depth)], patches, afresh)

        low, high = 0, most * len(blocks)
        if cost(plan(high)) > self.gflops:
            raise DtemError(
                f"a budget of {self.gflops:g} GFLOPs cannot be met: merging all it can leaves {cost(plan(high)):.3g}"
            )
        while low < high:
            middle = (low + high) // 2
            if cost(plan(middle)) > self.gflops:
                low = middle + 1
            else:
                high = middle
        return PerLayer(plan(low))

    def __str__(self) -> str:
        return f"{self.gflops!r}G"


@dataclass(frozen=True)
class Threshold:
    """Every image merges what is alike: edges with a cosine above one number, or above each block's own."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(isinstance(v, int | float) and math.isfinite(v) for v in self.values):
            raise DtemError(f"thresholds {self.values} must be numbers, such as t0.8 or t0.9/0.8/0.8/0.7")

    def wanted(self, depth: int) -> list[Above]:
        if len(self.values) not in (1, depth):
            raise DtemError(
                f"the schedule {self} has {len(self.values)} entries, the model {depth} blocks: give 1 or one each"
            )
        return [Above(v) for v in (self.values * depth if len(self.values) == 1 else self.values)]

    def __str__(self) -> str:
        return "t" + "/".join(f"{float(v)!r}" for v in self.values)


@dataclass(frozen=True)
class Front:
    """A schedule for the first `blocks` blocks only, where the host says so. It is written as the schedule itself."""

    schedule: Constant | Inflected | Ratio
    blocks: int

    def wanted(self, depth: int) -> list[float]:
        return [*self.schedule.wanted(self.blocks), *[0] * (depth - self.blocks)]

    def __str__(self) -> str:
        return str(self.schedule)


@dataclass(frozen=True)
class Learned:
    """What the method has learned. A handle turns it into one r per block."""

    def __str__(self) -> str:
        return "learned"


@dataclass(frozen=True)
class Adaptive:
    """The thresholds that were calibrated. A handle turns it into these."""

    def __str__(self) -> str:
        return "adaptive"


Schedule = Constant | Inflected | PerLayer | Ratio | Threshold | Front | Budget | Learned | Adaptive


def parse(spec: object) -> Schedule:
    """Read a schedule in any of the forms of the table above."""
    if isinstance(spec, Schedule):
        return spec
    if isinstance(spec, str):
        return _parse_text(spec)
    if isinstance(spec, bool) or spec is None:
        raise DtemError(f"r = {spec!r} is not a schedule; write one of: {FORMS}")
    if isinstance(spec, int):
        return Constant(spec)
    if isinstance(spec, float):
        if spec.is_integer():
            return Constant(int(spec))
        return Ratio(spec)
    if isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray):
        if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[1], float):
            return Inflected(*spec)
        return PerLayer(tuple(spec))
    raise DtemError(f"r = {spec!r} is not a schedule; write one of: {FORMS}")


def _parse_text(text: str) -> Schedule:
    body = text.strip()
    if body in ("learned", "adaptive"):
        return Learned() if body == "learned" else Adaptive()
    try:
        if body[:1] == "t":
            return Threshold(tuple(float(part) for part in body[1:].split("/")))
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


def clamp(wanted: Sequence[float], patches: int, afresh: bool = False) -> tuple[int, ...]:
    """One whole r per block, none more than half of the patches that are left. Fractions are shares of what is left.

    `afresh`: every block brings its tokens back, so all patches are left at each.
    """
    plan = []
    for want in wanted:
        r = min(want if isinstance(want, int) else int(want * patches), patches // 2)
        plan.append(r)
        patches -= 0 if afresh else r
    return tuple(plan)


def resolve(schedule: Schedule, patches: int, depth: int, afresh: bool = False) -> tuple[int | Above, ...]:
    """The r of every block for an image of `patches` patches. `afresh` as in `clamp`."""
    if isinstance(schedule, Budget):
        raise DtemError(f"the budget {schedule} must be solved for a host first (dtem.patch does that)")
    if isinstance(schedule, (Learned, Adaptive)):  # a tuple: torch 2.8 cannot compile a union
        raise DtemError(f"the schedule {schedule} must be asked of its handle first (dtem.patch does that)")
    if isinstance(schedule, Threshold):
        return tuple(schedule.wanted(depth))
    return clamp(schedule.wanted(depth), patches, afresh)


def at_front(schedule: Schedule, blocks: int | None) -> Schedule:
    """The schedule for a host that merges in its first `blocks` blocks (None: in all), unless r is given per block."""
    if blocks is not None and isinstance(schedule, Threshold) and len(schedule.values) == 1:
        raise DtemError(f"r = {schedule}: this model merges in its first {blocks} blocks; give a threshold per block")
    if blocks is None or not isinstance(schedule, Constant | Inflected | Ratio):
        return schedule
    return Front(schedule, blocks)


def check(schedule: Schedule, patches: int, depth: int, at: Collection[int] | None = None) -> None:
    """Refuse what no image of this host can meet: more than half of all patches in one block; and tokens removed
    elsewhere than in the blocks `at`, if there are such."""
    if isinstance(schedule, Budget | Learned | Adaptive):
        return
    if isinstance(schedule, Threshold):
        schedule.wanted(depth)
        return
    wanted = schedule.wanted(depth)
    outside = [layer for layer, r in enumerate(wanted) if r and at is not None and layer not in at]
    if outside:
        assert at is not None
        listed = ", ".join(map(str, sorted(at)))
        example = "/".join("8" if layer in at else "0" for layer in range(depth))
        raise DtemError(
            f"r = {schedule} would remove tokens in block {outside[0]}, and this method can in blocks {listed} only: "
            f"give one r per block, such as {example}, or a budget such as 2.5G"
        )
    if isinstance(schedule, Ratio):
        return
    largest = max(wanted, default=0)
    if largest > patches // 2:
        raise DtemError(
            f"r = {largest} is more than half of the model's {patches} patches; one block can merge at most "
            f"{patches // 2}. Choose r <= {patches // 2}."
        )


def tokens(plan: Sequence[int], patches: int, prefix: int) -> tuple[int, ...]:
    """Tokens after each block."""
    left, counts = patches + prefix, []
    for r in plan:
        left -= r
        counts.append(left)
    return tuple(counts)


def _check_count(r: object) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r < 0:
        raise DtemError(f"r = {r!r} must be a whole number of tokens, 0 or more")
