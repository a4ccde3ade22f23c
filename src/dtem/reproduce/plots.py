"""Records as plots: the study's metric against cost, or against the setting that was swept."""

import io
from collections.abc import Mapping
from typing import Any

from dtem.measure.record import Record
from dtem.reproduce.specs import Study
from dtem.reproduce.tables import LABELS, SECOND

_MARKERS = "osD^vPX*"


def draw(study: Study, kept: Record, form: str = "svg") -> bytes:
    """The plot as the content of a file; the same record gives the same bytes."""
    from dtem.visualise import curves

    curves.check()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [study.metric]
    finer = SECOND.get(study.task)
    if study.measure == "accuracy" and finer == "cross_entropy":
        metrics.append(finer)
    figure = Figure(figsize=(5.2 * len(metrics), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, metric in enumerate(metrics):
        _panel(study, kept.results, metric, figure.add_subplot(1, len(metrics), place + 1))
    where = f"{kept.results['scale']} scale: {', '.join(kept.results['about']['models'])}"
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
        for place, _, seeds in points:
            if len(seeds) > 1:
                axes.plot([place] * len(seeds), seeds, ".", color=line.get_color(), alpha=0.5, markersize=4, zorder=0)
    numbers = [point[0] for points in lines.values() for point in points]
    if study.axis not in ("gflops", "rate") and numbers and all(isinstance(x, int | float) for x in numbers):
        positive = [x for x in numbers if x > 0]
        if len(positive) == len(numbers) and max(positive) > 8 * min(positive):
            axes.set_xscale("log")
    below = {"gflops": "GFLOPs (MACs)", "rate": "blocks" if study.measure == "kendall" else "r"}
    axes.set(xlabel=below.get(study.axis, study.axis), ylabel=LABELS.get(metric, metric))
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=7)


Points = list[tuple[Any, float, list[float]]]


def _lines(study: Study, results: Mapping[str, Any], metric: str) -> tuple[dict[str, Points], dict[str, float]]:
    """Lines by name, and levels that hold for all of a plot (what merges nothing, or does not depend on the axis)."""
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
            place = row["settings"][study.axis]
            rest = ", ".join(part for part in row["row"].split(", ") if not part.startswith(f"{study.axis} = "))
            name = f"{rest}, r = {row['rate']}" if rest else f"r = {row['rate']}"
            lines.setdefault(name, []).append((float(place), value, seeds))
        elif row["row"] == study.reference:
            levels[f"{row['row']}, r = {row['rate']}"] = value
        else:
            lines.setdefault(f"{row['row']}, r = {row['rate']}", [])
    ordered = {name: sorted(points, key=_first) if study.axis != "rate" else points for name, points in lines.items()}
    return {name: points for name, points in ordered.items() if points}, levels


def _first(point: tuple[Any, float, list[float]]) -> float:
    return float(point[0])
