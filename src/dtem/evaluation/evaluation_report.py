"""What the reports of all tasks share: one row per variant, JSON, the plot, the record."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation.flops_report import CONVENTIONS
from dtem.evaluation.variants import REFERENCE, UNMERGED, Setup, Variant
from dtem.measure import record
from dtem.tables import Report

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
        """Draw the metric against GFLOPs, one line per method, as .png, .svg or .pdf."""
        from dtem.visualise import curves

        name, axis = self.plotted

        def point(row: Row, label: str) -> curves.Point:
            value = getattr(row, name)
            if not isinstance(value, float):
                raise DtemError(f"there is nothing to plot: {name} {value}")
            return curves.Point(row.macs / 1e9, value, label)

        lines: dict[str, list[curves.Point]] = {}
        base, *rows = self.rows
        for row in rows:
            lines.setdefault(row.method, []).append(point(row, f"r={row.r}"))
        curves.save(lines, path, base=point(base, UNMERGED), title=self.model, value=axis)

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
