"""What `dtem.tune` returns: plans with their times and divergences, as tables, JSON and plots."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtem.files import write_file
from dtem.measure.throughput import Spread
from dtem.schedule import PerLayer
from dtem.tables import Report, Table, spread

POOR_FIT = 0.1
"""Relative error of fitted costs from which on the report warns."""


@dataclass(frozen=True)
class TuneRow:
    """One plan."""

    name: str
    """``unmerged``, ``constant`` (the same r in every block) or ``tuned``."""
    plan: tuple[int, ...]
    seconds: float
    """Of one forward of the batch, measured."""
    predicted: float
    """The same by the cost table."""
    speedup: Spread
    """Over the unmerged model."""
    divergence: float
    """From the unmerged model, on the photographs that plans were compared on."""
    test_divergence: float | None
    """The same on other photographs."""
    test_error: float | None
    """Standard error of that mean."""

    @property
    def text(self) -> str:
        """The plan as `r` takes it."""
        return str(PerLayer(self.plan))


@dataclass(frozen=True, repr=False)
class TuneReport(Report):
    """Outcome of `dtem.tune`."""

    model: str
    method: str
    target: str | None
    batch: int
    engine: str
    dtype: str
    threads: int
    machine: str
    table_error: float
    """Mean relative error of the fitted costs."""
    divergence: str | None
    """``KL`` of the logits, or ``1 − cosine`` of features."""
    images: int
    rows: list[TuneRow]
    """The unmerged model, then constant and tuned plans in pairs, each pair for the same time."""
    tokens: dict[str, list[int]]
    """By plan: tokens after every block."""
    block_milliseconds: dict[str, list[float]]
    """By plan: time of every block, by the cost table."""
    constant_milliseconds: dict[str, float]
    """By constant r: time of a forward, by the cost table."""
    cache: str
    """File name of the cost table in the user's cache."""

    @property
    def plan(self) -> tuple[int, ...] | None:
        """The plan that was tuned last."""
        return self.rows[-1].plan if self.rows else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan}

    def parts(self) -> list[Table | str]:
        where = f"{self.engine}, {self.dtype}, batch {self.batch}, threads: {self.threads}"
        title = f"{self.model}, {self.method}, {where}"
        fit = f"the costs of this machine are fitted to {100 * self.table_error:.1f} %"
        if self.table_error > POOR_FIT:
            fit += ", which is poor: it was busy. Measure again on an idle one (refresh=True)"
        if not self.rows:
            cells = [[r, f"{time:.2f}"] for r, time in self.constant_milliseconds.items()]
            return [Table(title, ["r", "ms"], cells), fit, "r = '12ms' and r = '1.8x' work now"]
        others = any(row.test_divergence is not None for row in self.rows)
        columns = ["plan", "r by block", "ms", "(predicted)", "speed-up (quartiles)", f"{self.divergence}"]
        cells = []
        for row in self.rows:
            times = [f"{1000 * row.seconds:.2f}", f"{1000 * row.predicted:.2f}"]
            faster = spread(row.speedup.median, row.speedup.low, row.speedup.high)
            text = row.text if any(row.plan) else ""
            line = [row.name, text, *times, faster, f"{row.divergence:.4f}"]
            if others:
                line.append(f"{row.test_divergence:.4f} ± {row.test_error or 0.0:.4f}")
            cells.append(line)
        columns += [f"{self.divergence}, unused images"] * others
        parts: list[Table | str] = [Table(title, columns, cells, left=2)]
        if self.target is not None:
            parts.append(self._blocks())
            parts.append(f"r = {self.rows[-1].text}")
        return [*parts, fit]

    def _blocks(self) -> Table:
        """Tokens and milliseconds by block, of the constant and the tuned plan."""
        even, tuned = self.rows[-2].text, self.rows[-1].text
        cells = []
        for block, count in enumerate(self.tokens[tuned]):
            times = [f"{self.block_milliseconds[plan][block]:.2f}" for plan in (even, tuned)]
            cells.append([str(block), str(self.tokens[even][block]), str(count), *times])
        heads = ["block", "tokens: constant", "tuned", "ms: constant", "tuned"]
        return Table("by block", heads, cells)

    def save_plot(self, path: str | Path) -> None:
        """Draw divergence against time (a curve), or tokens and milliseconds by block; .png, .svg or .pdf."""
        write_file(path, self.draw(Path(path)))

    def draw(self, path: Path) -> bytes:
        """The plot as the content of a file of that name."""
        from dtem.visualise import curves

        form = curves.form_of(path)
        if self.target is None:
            lines: dict[str, list[curves.Point]] = {"constant": [], "tuned": []}
            for row in self.rows[1:]:
                value = row.divergence if row.test_divergence is None else row.test_divergence
                error = 1.96 * row.test_error if row.test_error else 0.0
                label = f"r={row.plan[0]}" if row.name == "constant" else ""
                interval = (value - error, value + error) if error else None
                lines[row.name].append(curves.Point(1000 * row.seconds, value, label, interval))
            first = self.rows[0]
            base = curves.Point(1000 * first.seconds, 0.0, "unmerged")
            cost = f"milliseconds of a batch of {self.batch} ({self.engine}, {self.threads} threads)"
            value_name = f"{self.divergence} from the unmerged model"
            return curves.draw_panels([curves.Panel(lines, base, cost, value_name, least_span=0.0)], form=form)
        panels = []
        for name, numbers in (("tokens after the block", self.tokens), ("milliseconds", self.block_milliseconds)):
            drawn = {
                row.name: [curves.Point(block, value, "") for block, value in enumerate(numbers[row.text])]
                for row in self.rows[-2:]
            }
            panels.append(curves.Panel(drawn, None, "block", name, least_span=0.0))
        return curves.draw_panels(panels, title=f"{self.model}, {self.target}", form=form)
