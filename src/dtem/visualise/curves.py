"""Trade-off curves: accuracy against cost, one line per method."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtem.errors import DtemError, require
from dtem.files import write_file

FORMATS = ("png", "svg", "pdf")
_MARKERS = "osD^vPX*"


class Point(NamedTuple):
    """One method at one r."""

    gflops: float
    accuracy: float
    """In percent."""
    label: str
    """Written beside it, such as ``r=16``."""


def draw(
    lines: Mapping[str, Sequence[Point]],
    *,
    base: Point | None = None,
    title: str = "",
    cost: str = "GFLOPs (MACs)",
    value: str = "top-1 accuracy (%)",
    now: Mapping[str, Point] | None = None,
    form: str = "png",
) -> bytes:
    """The plot as the content of a file: each line by its name, and `base` (the unmerged model) as a horizontal line.
    Points of `now`, by the name of their line, are ringed.

    The same input gives the same bytes: no date goes in. SVG is fit for embedding in a page.
    """
    if form not in FORMATS:
        raise DtemError(f"a plot cannot be {form!r}; choose {', '.join(FORMATS)}")
    if not any(lines.values()):
        raise DtemError("there is nothing to plot: no method has a point")
    figure = _figure(lines, base, title, (cost, value), now or {})
    content = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with require("matplotlib", "plot").rc_context({"svg.hashsalt": "dtem"}):
        figure.savefig(content, format=form, metadata=dates.get(form), dpi=150)
    return content.getvalue()


def save(lines: Mapping[str, Sequence[Point]], path: str | Path, **options: Any) -> None:
    """`draw` into a file; its ending (.png, .svg, .pdf) names the format."""
    write_file(path, draw(lines, form=form_of(path), **options))


def form_of(path: str | Path, formats: Sequence[str] = FORMATS, kind: str = "plot") -> str:
    """The format that the ending of a file names."""
    form = Path(path).suffix.removeprefix(".").lower()
    if form not in formats:
        raise DtemError(
            f"{path}: not a file format of a {kind}; the name must end in {' or '.join('.' + name for name in formats)}"
        )
    return form


def _figure(
    lines: Mapping[str, Sequence[Point]],
    base: Point | None,
    title: str,
    axis: tuple[str, str],
    now: Mapping[str, Point],
) -> Any:
    require("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if base is not None:
        axes.axhline(base.accuracy, color="0.6", linewidth=1, linestyle="--", zorder=0)
        axes.plot([base.gflops], [base.accuracy], "k*", markersize=10, label=base.label, linestyle="none")
    for index, (name, points) in enumerate(lines.items()):
        ordered = sorted(points)
        marker = _MARKERS[index % len(_MARKERS)]
        axes.plot([p.gflops for p in ordered], [p.accuracy for p in ordered], marker=marker, label=name)
        below = index % 2 == 0  # so that the texts of two methods at the same cost do not cover each other
        for point in ordered:
            axes.annotate(
                point.label,
                (point.gflops, point.accuracy),
                xytext=(0, -12 if below else 7),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color="0.3",
            )
    for name, point in now.items():
        place, red = (point.gflops, point.accuracy), "#d62728"
        axes.scatter(*place, marker="o", s=130, facecolors="none", edgecolors=red, linewidths=2, zorder=3)
        shift = (8, 8) if list(lines).index(name) % 2 else (8, -14)
        axes.annotate(point.label, place, xytext=shift, textcoords="offset points", fontsize=8, color=red)
    axes.margins(0.08, 0.12)
    axes.set(xlabel=axis[0], ylabel=axis[1], title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
