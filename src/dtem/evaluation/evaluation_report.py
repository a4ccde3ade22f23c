"""What the reports of all tasks share: one row per variant, JSON, the plot, the record."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation.flops_report import CONVENTIONS
from dtem.evaluation.variants import REFERENCE, UNMERGED, Setup, Variant
from dtem.measure import record
from dtem.measure.statistics import Difference
from dtem.tables import Report

if TYPE_CHECKING:
    from dtem.visualise.curves import Point

THROUGHPUT_NOTE = "im/s: forward only, measured along the way: a rough number. Rely on `dtem bench`."


class Row(Protocol):
    """One variant in a report."""

    @property
    def method(self) -> str:
        """Label of the method; ``unmerged`` for the model itself."""

    @property
    def r(self) -> str:
        """Its schedule."""

    @property
    def macs(self) -> int:
        """MACs of one image."""


@dataclass(frozen=True, repr=False)
class EvaluationReport(Report):
    """What `dtem.evaluate` returns. Prints as a table; `to_dict()` is what `dtem eval --json` prints."""

    model: str
    data: str
    images: int
    """Images that every variant was run on."""
    device: str
    dtype: str
    rows: Sequence[Row]
    """One per variant, the unmerged model first."""
    outcomes: dict[str, Any] = field(metadata={"json": False})
    """Per-image outcomes by variant, such as ``tome-r8``."""

    task: ClassVar[str]
    plotted: ClassVar[tuple[str, str]]
    """The field of a row that `save_plot` draws, and the name of its axis."""

    def to_dict(self) -> dict[str, Any]:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("json", True)}
        rows: Sequence[Any] = self.rows
        return {"task": self.task, **shown, "conventions": CONVENTIONS, "rows": [asdict(row) for row in rows]}

    def save_plot(self, path: str | Path) -> None:
        """Draw the metric against GFLOPs, one line per method, as .png, .svg or .pdf.

        Bars are 95 % intervals of the difference to the unmerged model, image by image.
        """
        from dtem.visualise import curves

        lines, base = self.curve()
        curves.save(
            lines, path, base=base, title=f"{self.model}, {self.images} images of {self.data}", value=self.plotted[1]
        )

    def curve(self) -> "tuple[dict[str, list[Point]], Point]":
        """What `save_plot` draws: points by method, and the unmerged model."""
        from dtem.visualise.curves import Point

        name, _ = self.plotted
        base, *rows = self.rows

        def point(row: Row, label: str) -> Point:
            value, between = getattr(row, name), self.against_unmerged(row)
            if not isinstance(value, float):
                raise DtemError(f"there is nothing to plot: {name} {value}")
            interval = (
                None if between is None else (value - between.value + between.low, value - between.value + between.high)
            )
            return Point(row.macs / 1e9, value, label, interval)

        lines: dict[str, list[Point]] = {}
        for row in rows:
            lines.setdefault(row.method, []).append(point(row, f"r={row.r}"))
        return lines, point(base, UNMERGED)

    def against_unmerged(self, row: Any) -> Difference | None:
        """The difference of a row to the unmerged model in the metric that is plotted."""
        difference: Difference | None = row.against_unmerged
        return difference

    @property
    def title(self) -> str:
        """The title of the table."""
        return f"{self.model}, {self.data}, {self.device}, {self.dtype}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.title}, {len(self.rows)} variants, {self.images} images>"


def save_record(report: Report, folder: Path | None, data: str | Source, kind: str = "eval") -> None:
    """Write record.json, the report with its provenance, if there is a folder."""
    if folder is not None:
        spec = data if isinstance(data, str) else data.spec
        data_hash = record.data_hash(spec) if Path(spec).is_dir() else None
        record.save(record.collect(kind, report.to_dict(), seed=0, data=data_hash), folder / "record.json")


Outcome = TypeVar("Outcome")
Pair = TypeVar("Pair")


def shared_fields(setup: Setup, spec: str, outcomes: Mapping[str, Sized]) -> dict[str, Any]:
    """What the reports of all tasks say about a run on the data of `spec`."""
    return {
        "model": setup.name,
        "data": public_name(spec),
        "images": len(outcomes[UNMERGED]),
        "device": setup.settings.device,
        "dtype": setup.settings.dtype,
        "outcomes": outcomes,
    }


def differences(
    variants: Sequence[Variant], outcomes: Mapping[str, Outcome], paired: Callable[[Outcome, Outcome], Pair]
) -> dict[str, dict[str, Pair | None]]:
    """By name, each variant against the unmerged model and, other methods only, against ToMe at the same r."""
    tome = {variant.r: variant.name for variant in variants if variant.label == REFERENCE}

    def against(other: str | None, name: str) -> Pair | None:
        return None if other in (None, name) else paired(outcomes[other], outcomes[name])

    return {
        variant.name: {
            "against_unmerged": against(UNMERGED, variant.name),
            "against_tome": against(tome.get(variant.r), variant.name),
        }
        for variant in variants
    }


def public_name(spec: str) -> str:
    """Data or a model as it is named in a report: without the folders of this machine."""
    return record.plain_command(["", spec])[1]


def left_out_notes(left_out: int, labels: Sequence[str], unreadable: int) -> list[str]:
    """Lines about images that no variant was run on; none where there are none."""
    notes = {
        f"{unreadable} files that cannot be read were excluded, see --json": unreadable,
        f"{left_out} training images of {', '.join(labels)} excluded for every variant": left_out,
    }
    return [note for note, count in notes.items() if count]
