"""The leaderboard: one YAML file per entry in `entries`, measured here or quoted from a publication.

A measured entry names a record of benchmarks/results and the row that it is; its numbers must be that row's. A quoted
one names its reference. `python -m benchmarks.leaderboard` checks all entries and writes leaderboard.csv and
index.html; README.md says how to contribute.
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import common
from dtem.errors import DtemError
from dtem.measure import record

FOLDER = Path(__file__).resolve().parent
ENTRIES = FOLDER / "entries"
CONVENTIONS = ("macs", "paper")
"""`macs`: multiply-adds of products and convolutions. `paper`: biases, norms, softmax and GELU too, as DTEM's paper."""
_NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Entry:
    """One entry, as its file says."""

    method: str
    """Registered name, or for a quoted entry that of the publication."""
    variant: str
    """The method with what was added to it, as tables name it."""
    model: str
    """timm name of the host."""
    rate: str
    """The schedule, in the form of `dtem.schedule` or as published."""
    gflops: float
    convention: str
    """What `gflops` counts: one of `CONVENTIONS`."""
    top1: float
    """In %."""
    images: int
    data: str
    """Which photographs."""
    training: str
    """What was trained for this entry, on what; "none" for a frozen model as published."""
    hardware: str
    kind: str
    """`measured`: by a record in benchmarks/results. `quoted`: from a publication, not measured here."""
    interval: tuple[float, float] | None = None
    """95 % interval of top-1 (Wilson) over the photographs; none where it is quoted."""
    record: str | None = None
    row: dict[str, Any] | None = None
    """Of the record: fields by which exactly one of its rows is selected."""
    reference: str | None = None
    """Of a quoted entry: publication, table, address."""


def wilson(top1: float, images: int) -> tuple[float, float]:
    """95 % interval of a share of right answers, in %, to one digit.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n), z = 1.96
    """
    share, square = top1 / 100, _NORMAL_95**2 / images
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / images + square / (4 * images))
    low, high = ((share + square / 2 + sign * half) / (1 + square) for sign in (-1, 1))
    return round(100 * low, 1), round(100 * high, 1)


def read(file: Path) -> Entry:
    """One entry; a file that is no entry, or whose numbers are not those of its record, is refused by name."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DtemError(f"{file.name} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise DtemError(f"{file.name} must hold fields of an entry, one per line: see README.md")
    fields = {field.name: field for field in dataclasses.fields(Entry)}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    for problem, names in (("has unknown fields", content.keys() - fields), ("lacks", required - content.keys())):
        if names:
            raise DtemError(f"{file.name} {problem}: {', '.join(sorted(map(str, names)))}")
    for name, kind in (("gflops", float), ("top1", float), ("images", int)):
        if not isinstance(content[name], kind) or not content[name] > 0:
            raise DtemError(f"{file.name}: {name} = {content[name]!r} must be a positive {kind.__name__}")
    if content["interval"] is not None if "interval" in content else False:
        content["interval"] = tuple(content["interval"])
    texts = required - {"gflops", "top1", "images"}
    for name in sorted(texts):
        if not isinstance(content[name], str) or not content[name]:
            raise DtemError(f"{file.name}: {name} = {content[name]!r} must be text (in quotes, if it is a number)")
    entry = Entry(**content)
    if entry.convention not in CONVENTIONS:
        raise DtemError(f"{file.name}: convention = {entry.convention!r}; choose one of: {', '.join(CONVENTIONS)}")
    if entry.kind == "measured":
        _check_measured(file.name, entry)
    elif entry.kind == "quoted":
        if not entry.reference or entry.record or entry.row or entry.interval:
            raise DtemError(f"{file.name}: a quoted entry has a reference, and neither record, row nor interval")
    else:
        raise DtemError(f"{file.name}: kind = {entry.kind!r}; choose measured or quoted")
    return entry


def _check_measured(name: str, entry: Entry) -> None:
    """The numbers are those of one row of the record."""
    if not entry.record or not entry.row or entry.reference:
        raise DtemError(f"{name}: a measured entry has a record and a row, and no reference")
    file = common.RESULTS / f"{entry.record}.json"
    measured = record.load_record(file)
    rows = [row for row in measured.results["rows"] if all(row.get(k) == v for k, v in entry.row.items())]
    if len(rows) != 1:
        raise DtemError(f"{name}: row = {entry.row} selects {len(rows)} rows of {file.name}; it must select one")
    expected = numbers_of(measured, rows[0], entry.convention)
    for field, value in expected.items():
        if getattr(entry, field) != value:
            raise DtemError(f"{name}: {field} = {getattr(entry, field)!r}, but {file.name} has {value!r}")


def numbers_of(measured: record.Record, row: dict[str, Any], convention: str) -> dict[str, Any]:
    """What a record says of one entry."""
    images, top1 = measured.results["images"], round(row["top1"], 2)
    return {
        "gflops": round(row[convention] / 1e9, 3),
        "top1": top1,
        "images": images,
        "interval": wilson(top1, images),
        "model": measured.results["model"],
        "hardware": measured.machine["cpu"],
    }


def read_all(folder: Path = ENTRIES) -> list[Entry]:
    """All entries, by model, kind, GFLOPs and top-1."""
    entries = {file: read(file) for file in sorted(folder.glob("*.yaml"))}
    seen: dict[tuple[str, ...], Path] = {}
    for file, entry in entries.items():
        key = (entry.model, entry.variant, entry.rate, entry.kind, entry.record or entry.reference or "")
        if key in seen:
            raise DtemError(f"{file.name} and {seen[key].name} are the same entry")
        seen[key] = file
    return sorted(entries.values(), key=lambda e: (e.model, e.kind, e.data, e.gflops, -e.top1, e.variant))


def groups(entries: list[Entry]) -> dict[tuple[str, str, str, str], list[Entry]]:
    """Entries that may be ranked against each other: same model, kind, photographs and convention."""
    found: dict[tuple[str, str, str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.model, entry.kind, entry.data, entry.convention), []).append(entry)
    return found


def on_front(entry: Entry, group: list[Entry]) -> bool:
    """Whether no other entry of the group is at least as accurate for at most as many GFLOPs, and better in one."""
    return not any(
        other.top1 >= entry.top1
        and other.gflops <= entry.gflops
        and (other.top1 > entry.top1 or other.gflops < entry.gflops)
        for other in group
    )
