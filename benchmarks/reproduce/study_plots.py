"""Plot of a study's record: its metric against GFLOPs, rate, or the swept setting."""

from collections.abc import Mapping
from typing import Any

from benchmarks.reproduce.specs import Study
from benchmarks.reproduce.study_tables import LABELS, SECOND
from dtem.measure.record import Record
from dtem.visualise import curves
from dtem.visualise.curves import Panel, Point

VALUES = LABELS | {
    "top1": "top-1 accuracy (%)",
    "miou": "mean IoU (%)",
    "cross_entropy": "cross-entropy (nats)",
    "kendall": "rank correlation (Kendall's τ)",
    "foreground": "tokens on the object (%)",
    "speedup": "speed-up over the unmerged model (×)",
}
"""Names of value axes."""
AXES = {
    "gflops": curves.COST,
    "r": "tokens merged in every block in training (r)",
    "fraction": "share of the training images",
    "temperature": "temperature of soft grouping",
}
LEAST_SPANS = {"cross_entropy": 0.2, "loss": 0.2, "kendall": 0.2, "speedup": 1.0}
INTERVALS = {"cross_entropy": "loss"}
"""Where the difference to the reference has another name than the metric."""


def draw(study: Study, record: Record, form: str = "svg") -> bytes:
    """The plot as file content; the same record gives the same bytes."""
    return curves.draw_panels(panels(study, record), title=title(study, record), form=form)


def title(study: Study, record: Record) -> str:
    """Study, scale and models."""
    return f"{study.title}, {record.results['scale']} scale: {', '.join(record.results['about']['models'])}"


def caption(study: Study, record: Record) -> str:
    """What the bars and dots of the plot are."""
    if study.at(record.results["scale"]).measure == "speed":
        return "Bars: quartiles over the rounds."
    dots = " Dots: single seeds." if any(len(row["seeds"]) > 1 for row in record.results["rows"]) else ""
    return f"Bars: 95 % interval of the difference to {study.reference}.{dots}"


def panels(study: Study, record: Record) -> list[Panel]:
    """The main metric, and for classification cross-entropy."""
    measure = study.at(record.results["scale"]).measure
    metrics = ["speedup" if measure == "speed" else study.metric]
    second = SECOND.get(study.task)
    if measure == "accuracy" and second == "cross_entropy":
        metrics.append(second)
    return [_panel(study, record.results, metric) for metric in metrics]


def _panel(study: Study, results: Mapping[str, Any], metric: str) -> Panel:
    lines, levels = _lines(study, results, metric)
    ticks: list[str] = []
    if study.axis == "rate" and any(not isinstance(place, int | float) for line in lines.values() for place, _ in line):
        ticks = list(dict.fromkeys(place for line in lines.values() for place, _ in line))
        lines = {name: [(ticks.index(place), point) for place, point in line] for name, line in lines.items()}
    numbers = [place for line in lines.values() for place, _ in line]
    positive = [place for place in numbers if place > 0]
    spread_out = len(positive) == len(numbers) and max(positive, default=0) > 8 * min(positive, default=1)
    cost = AXES.get(study.axis, study.axis)
    if study.axis == "rate":
        cost = "blocks of the model" if study.metric == "kendall" else "tokens merged in every block (r)"
    return Panel(
        {name: [point._replace(gflops=place) for place, point in line] for name, line in lines.items()},
        cost=cost,
        value=VALUES.get(metric, metric),
        levels=levels,
        ticks=[tick.removeprefix("blocks ") for tick in ticks] if study.metric == "kendall" else ticks,
        log=study.axis not in ("gflops", "rate") and spread_out,
        least_span=LEAST_SPANS.get(metric, curves.LEAST_SPAN),
    )


Line = list[tuple[Any, Point]]
"""Points with their places on the cost axis, which may be names."""


def _lines(study: Study, results: Mapping[str, Any], metric: str) -> tuple[dict[str, Line], dict[str, float]]:
    """Lines by name, and horizontal levels (the unmerged model, and a reference that does not depend on the axis)."""
    lines: dict[str, Line] = {}
    levels: dict[str, float] = {}
    for row in results["rows"]:
        if metric not in row["metrics"]:
            continue
        value = row["metrics"][metric]
        label = f"r={row['rate']}" if study.axis == "gflops" else ""
        point = Point(0.0, value, label, _interval(row, metric), tuple(row["by_seed"].get(metric, ())))
        if not row["rate"]:
            levels[row["row"]] = value
        elif study.axis == "gflops":
            lines.setdefault(row["row"], []).append((row["metrics"]["macs"] / 1e9, point))
        elif study.axis == "rate":
            lines.setdefault(row["row"], []).append((_number(row["rate"]), point))
        elif study.axis in row["settings"]:
            rest = ", ".join(part for part in row["row"].split(", ") if not part.startswith(f"{study.axis} = "))
            name = f"{rest}, r = {row['rate']}" if rest else f"r = {row['rate']}"
            lines.setdefault(name, []).append((float(row["settings"][study.axis]), point))
        elif row["row"] == study.reference:
            levels[f"{row['row']}, r = {row['rate']}"] = value
        else:
            lines.setdefault(f"{row['row']}, r = {row['rate']}", [])
    return {name: line for name, line in lines.items() if line}, levels


def _interval(row: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """Of the difference to the reference, as values of this row; of a timing, its quartiles."""
    if metric == "speedup":
        return row["spread"]["low"], row["spread"]["high"]
    between = (row["against_reference"] or {}).get(INTERVALS.get(metric, metric))
    if between is None:
        return None
    reference = row["metrics"][metric] - between["value"]
    return reference + between["low"], reference + between["high"]


def _number(rate: str) -> float | str:
    return float(rate) if rate.replace(".", "", 1).isdigit() else rate
