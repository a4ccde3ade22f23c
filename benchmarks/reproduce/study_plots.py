"""Plot of a study's record: its metric against GFLOPs, rate, or the swept setting."""

import io
from collections.abc import Mapping
from typing import Any

from benchmarks.reproduce.specs import Study
from benchmarks.reproduce.study_tables import LABELS, SECOND
from dtem.errors import require
from dtem.measure.record import Record

_MARKERS = "osD^vPX*"


def draw(study: Study, record: Record, form: str = "svg") -> bytes:
    """The plot as file content; the same record gives the same bytes."""
    matplotlib = require("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measure = study.at(record.results["scale"]).measure
    metrics = ["speedup" if measure == "speed" else study.metric]
    second = SECOND.get(study.task)
    if measure == "accuracy" and second == "cross_entropy":
        metrics.append(second)
    figure = Figure(figsize=(5.2 * len(metrics), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for index, metric in enumerate(metrics):
        _panel(study, record.results, metric, figure.add_subplot(1, len(metrics), index + 1))
    where = f"{record.results['scale']} scale: {', '.join(record.results['about']['models'])}"
    figure.suptitle(f"{study.title}\n{where}", fontsize=10)
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dtem"}):
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None, dpi=150)
    return content.getvalue()


def _panel(study: Study, results: Mapping[str, Any], metric: str, axes: Any) -> None:
    lines, levels = _lines(study, results, metric)
    for name, value in levels.items():
        axes.axhline(value, color="0.6", linewidth=1, linestyle="--", zorder=0)
        axes.annotate(name, (0.01, value), xycoords=("axes fraction", "data"), fontsize=7, color="0.4", va="bottom")
    for index, (name, points) in enumerate(lines.items()):
        x = [point[0] for point in points]
        y = [point[1] for point in points]
        (line,) = axes.plot(x, y, marker=_MARKERS[index % len(_MARKERS)], label=name)
        for position, _, seeds in points:
            if len(seeds) > 1:
                axes.plot(
                    [position] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.5, markersize=4, zorder=0
                )
    numbers = [point[0] for points in lines.values() for point in points]
    if study.axis not in ("gflops", "rate") and numbers and all(isinstance(x, int | float) for x in numbers):
        positive = [x for x in numbers if x > 0]
        if len(positive) == len(numbers) and max(positive) > 8 * min(positive):
            axes.set_xscale("log")
    x_labels = {"gflops": "GFLOPs (MACs)", "rate": "blocks" if study.metric == "kendall" else "r"}
    axes.set(xlabel=x_labels.get(study.axis, study.axis), ylabel=LABELS.get(metric, metric))
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=7)


Points = list[tuple[Any, float, list[float]]]


def _lines(study: Study, results: Mapping[str, Any], metric: str) -> tuple[dict[str, Points], dict[str, float]]:
    """Lines by name, and horizontal levels (the unmerged model, and a reference that does not depend on the axis)."""
    lines: dict[str, Points] = {}
    levels: dict[str, float] = {}
    for row in results["rows"]:
        if metric not in row["metrics"]:
            continue
        value, seeds = row["metrics"][metric], row["by_seed"].get(metric, [])
        if not row["rate"]:
            levels[row["row"]] = value
        elif study.axis == "gflops":
            lines.setdefault(row["row"], []).append((row["metrics"]["macs"] / 1e9, value, seeds))
        elif study.axis == "rate":
            lines.setdefault(row["row"], []).append((row["rate"], value, seeds))
        elif study.axis in row["settings"]:
            position = row["settings"][study.axis]
            rest = ", ".join(part for part in row["row"].split(", ") if not part.startswith(f"{study.axis} = "))
            name = f"{rest}, r = {row['rate']}" if rest else f"r = {row['rate']}"
            lines.setdefault(name, []).append((float(position), value, seeds))
        elif row["row"] == study.reference:
            levels[f"{row['row']}, r = {row['rate']}"] = value
        else:
            lines.setdefault(f"{row['row']}, r = {row['rate']}", [])
    if study.axis != "rate":
        lines = {name: sorted(points, key=lambda point: float(point[0])) for name, points in lines.items()}
    return {name: points for name, points in lines.items() if points}, levels
