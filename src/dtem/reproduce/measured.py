"""Records of other measurements (speed, memory, …) as tables of whatever they hold: for the page of all records."""

from collections.abc import Mapping
from typing import Any

from dtem.measure.record import Record
from dtem.reproduce.tables import Table


def table(name: str, kept: Record) -> Table | None:
    """The rows of a record, one column per name; None where it holds no rows."""
    rows = kept.results.get("rows") if isinstance(kept.results, Mapping) else kept.results
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    lines = [_flat(row) for row in rows]
    columns = tuple(dict.fromkeys(column for line in lines for column in line))
    versions = f"torch {kept.versions['torch']}, timm {kept.versions['timm']}"
    caption = f"{kept.machine['cpu']}, {kept.machine['threads']} threads, {versions}, {kept.time[:10]}, commit "
    cells = tuple(tuple(line.get(column, "") for column in columns) for line in lines)
    return Table(name, columns, cells, caption + (kept.commit or "unknown")[:7])


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Values as text; a spread in one cell, what is nested otherwise as columns of its own."""
    found: dict[str, str] = {}
    for name, value in row.items():
        label = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping) and {"low", "high"} <= value.keys():
            middle = value.get("median", value.get("value", 0.0))
            found[label] = f"{_text(middle)} ({_text(value['low'])} … {_text(value['high'])})"
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{label} ")
        else:
            found[label] = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
