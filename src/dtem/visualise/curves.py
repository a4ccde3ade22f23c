"""Trade-off curves: accuracy against cost, one line per method, with intervals and with labels at the lines."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtem.errors import DtemError, require
from dtem.files import write_file
from dtem.visualise import style
from dtem.visualise.label_layout import LabelLayout, along, around

FORMATS = ("png", "svg", "pdf")
COST = "computation per image (GFLOPs, multiply-adds)"
VALUE = "top-1 accuracy (%)"
WIDE, NARROW = (6.4, 4.0), (3.6, 3.9)
"""Inches of a panel: for files and wide pages, and for a phone."""
LEAST_SPAN = 5.0
"""The value axis spans at least so much …"""
LEADER = 16.0
"""Pixels between a label and its point from which on a line joins them."""
SPAN_PER_INTERVAL = 3.0
"""… and so many times the longest interval: differences within the noise look small."""


class Point(NamedTuple):
    """One method at one r."""

    gflops: float
    accuracy: float
    """In percent."""
    label: str
    """Written beside it where there is room, such as ``r=16``."""
    interval: tuple[float, float] | None = None
    """Lower and upper end of its bar."""
    seeds: tuple[float, ...] = ()
    """Values of single runs, drawn as dots."""


@dataclass(frozen=True)
class Panel:
    """One plot: its lines by name, and what its axes show."""

    lines: Mapping[str, Sequence[Point]]
    base: Point | None = None
    """The unmerged model: a star, and a dashed line at its value."""
    cost: str = COST
    value: str = VALUE
    now: Mapping[str, Point] = field(default_factory=dict)
    """Ringed points, by the name of their line."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Values that do not depend on the cost: dashed lines by name."""
    ticks: Sequence[str] = ()
    """Names of the places 0, 1, … of the cost axis, instead of numbers."""
    log: bool = False
    least_span: float = LEAST_SPAN
    """Least span of the value axis."""


def draw(
    lines: Mapping[str, Sequence[Point]],
    *,
    base: Point | None = None,
    title: str = "",
    cost: str = COST,
    value: str = VALUE,
    form: str = "png",
) -> bytes:
    """The plot as the content of a file: each line with its name, and `base` (the unmerged model) as a dashed line.

    The same input gives the same bytes: no date goes in.
    """
    return draw_panels([Panel(lines, base, cost, value)], title=title, form=form)


def draw_panels(
    panels: Sequence[Panel],
    *,
    title: str = "",
    form: str = "png",
    size: tuple[float, float] = WIDE,
    below: bool = False,
) -> bytes:
    """Several plots side by side, or one `below` the other, as the content of a file."""
    if form not in FORMATS:
        raise DtemError(f"a plot cannot be {form!r}; choose {', '.join(FORMATS)}")
    for panel in panels:
        if not any(panel.lines.values()) and not panel.levels:
            raise DtemError("there is nothing to plot: no method has a point")
    content = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    settings = {"svg.hashsalt": f"dtem {size}", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
    with require("matplotlib", "plot").rc_context(settings):
        figure = _figure(panels, title, size, below)
        figure.savefig(content, format=form, metadata=dates.get(form), dpi=150)
    return (
        content.getvalue().replace(b"'DejaVu Sans'", style.FILE_FONT.encode()) if form == "svg" else content.getvalue()
    )


def for_page(panels: Sequence[Panel], title: str = "") -> str:
    """The plot as HTML that follows the page's scheme (`style.variables`), drawn once more for narrow screens."""
    drawn = {
        name: style.themed(draw_panels(panels, title=title, form="svg", size=size, below=below).decode())
        for name, size, below in (("wide", WIDE, False), ("narrow", NARROW, True))
    }
    views = "".join(f'<div class="{name}">{svg}</div>' for name, svg in drawn.items())
    return f'<div class="{"plot panels" if len(panels) > 1 else "plot"}">{views}</div>'


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


def value_limits(panel: Panel) -> tuple[float, float]:
    """Ends of the value axis: all values and intervals, and never so close that noise would look like a difference."""
    points = [point for line in panel.lines.values() for point in line]
    points += [*panel.now.values(), *([panel.base] if panel.base else [])]
    intervals = [point.interval for point in points if point.interval]
    values = [point.accuracy for point in points] + list(panel.levels.values())
    values += [value for pair in intervals for value in pair] + [value for point in points for value in point.seeds]
    low, high = min(values), max(values)
    longest = max((pair[1] - pair[0] for pair in intervals), default=0.0)
    span = max(1.16 * (high - low), SPAN_PER_INTERVAL * longest, panel.least_span)
    middle = (low + high) / 2
    bottom, top = middle - span / 2, middle + span / 2
    if "%" in panel.value and top > 101:  # no share is above 100 %
        bottom, top = max(101 - span, -1.0), 101.0
    return bottom, top


def _figure(panels: Sequence[Panel], title: str, size: tuple[float, float], below: bool) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(panels)
    width, height = size[0] * (1 if below else count), size[1] * (count if below else 1)
    if count > 1 and not below:
        width *= 0.8
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=_light("page"))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(*((count, 1) if below else (1, count)), index + 1) for index in range(count)]
    for each, panel in zip(axes, panels, strict=True):
        _draw_panel(each, panel)
    if title:
        figure.suptitle(title, fontsize=10, color=_light("ink"), x=0.01, ha="left")
    figure.draw_without_rendering()  # now the axes have their place
    figure.set_layout_engine("none")
    for each, panel in zip(axes, panels, strict=True):
        _label(each, panel)
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    """Lines, bars and axes, without labels."""
    colours = style.method_colours(panel.lines)
    muted, line = _light("muted"), _light("line")
    for value in [*panel.levels.values(), *([panel.base.accuracy] if panel.base else [])]:
        axes.axhline(value, color=muted, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    if panel.base is not None:
        axes.plot([panel.base.gflops], [panel.base.accuracy], "*", color=muted, markersize=11, zorder=4)
    for index, (name, points) in enumerate(panel.lines.items()):
        ordered, colour = sorted(points, key=lambda point: point.gflops), _light(colours[name])
        x, y = [p.gflops for p in ordered], [p.accuracy for p in ordered]
        marker = style.MARKERS[index % len(style.MARKERS)]
        axes.plot(x, y, marker=marker, color=colour, linewidth=1.8, markersize=5.5, zorder=3)
        for point in ordered:
            if point.interval is not None:
                ends = [[max(0.0, point.accuracy - point.interval[0])], [max(0.0, point.interval[1] - point.accuracy)]]
                bar = {"ecolor": colour, "elinewidth": 1.2, "capsize": 2.5, "alpha": 0.55}
                axes.errorbar([point.gflops], [point.accuracy], yerr=ends, fmt="none", zorder=2, **bar)
            if len(point.seeds) > 1:
                places = [point.gflops] * len(point.seeds)
                axes.plot(places, point.seeds, ".", color=colour, alpha=0.5, markersize=4, zorder=2)
    for name, point in panel.now.items():
        ring = {"facecolors": "none", "edgecolors": _light(colours.get(name, "ink")), "linewidths": 1.8}
        axes.scatter(point.gflops, point.accuracy, s=150, zorder=5, **ring)
    if panel.log:
        axes.set_xscale("log")
    axes.margins(0.08, 0)
    axes.set_ylim(*value_limits(panel))
    axes.locator_params(axis="y", nbins=6)
    if "%" in panel.value:
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 100])
        axes.set_ylim(*value_limits(panel))
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlim(-0.4, len(panel.ticks) - 0.6)
    elif not panel.log:
        axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(panel.cost, color=muted, fontsize=9)
    axes.set_ylabel(panel.value, color=muted, fontsize=9)
    axes.tick_params(colors=muted, labelcolor=muted, labelsize=8.5, length=0)
    axes.grid(axis="y", color=line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(line)


def _label(axes: Any, panel: Panel) -> None:
    """Write names and r beside the points, so that no text covers another one."""
    pixels = axes.transData.transform
    lines = {
        name: pixels([(p.gflops, p.accuracy) for p in sorted(points, key=lambda point: point.gflops)])
        for name, points in panel.lines.items()
        if points
    }
    layout = _obstacles(axes, panel, lines)
    colours = style.method_colours(panel.lines)
    heights = {name: float(line[: max(1, len(line) // 2), 1].mean()) for name, line in lines.items()}
    middle = float(np.median(list(heights.values()))) if heights else 0.0
    for name, line in lines.items():
        bold: dict[str, Any] = {"color": _light(colours[name]), "fontsize": 9.5, "fontweight": "bold"}
        places = [tuple(point) for point in np.concatenate([line, (line[1:] + line[:-1]) / 2])]
        _write(axes, layout, style.title(name), places, above=heights[name] > middle, anywhere=True, **bold)
    muted: dict[str, Any] = {"color": _light("muted"), "fontsize": 8.5}
    if panel.base is not None and panel.base.label:
        _write(axes, layout, panel.base.label, [tuple(pixels(panel.base[:2]))], anywhere=True, **muted)
    box = axes.get_window_extent()
    for name, value in panel.levels.items():
        height = float(pixels((1, value))[1])
        places = [(box.x0 + share * box.width, height) for share in (0.02, 0.25, 0.5, 0.75, 0.98)]
        _write(axes, layout, name, places, (1, 4), anywhere=True, **muted)
    for name, point in panel.now.items():
        own: dict[str, Any] = {"color": _light(colours.get(name, "ink")), "fontsize": 8}
        _write(axes, layout, point.label, [tuple(pixels(point[:2]))], (12, 20), **own)
    for text, anchors in _clusters(panel, pixels):
        _write(axes, layout, text, anchors, **muted | {"fontsize": 8})


def _obstacles(axes: Any, panel: Panel, lines: Mapping[str, Any]) -> LabelLayout:
    """The plot as it is before labels: none may cover markers, and lines and bars only where there is no other room."""
    pixels, box = axes.transData.transform, axes.get_window_extent()
    points = [point for line in panel.lines.values() for point in line]
    taken = [np.empty((0, 4)), *(around(line, 9.0) for line in lines.values())]
    taken += [around(pixels([(p.gflops, p.accuracy)]), 20.0) for p in panel.now.values()]
    avoided = [np.empty((0, 4)), *(along(line) for line in lines.values())]
    avoided += [along(pixels([(p.gflops, value) for value in p.interval])) for p in points if p.interval]
    values = list(panel.levels.values())
    if panel.base is not None:
        taken.append(around(pixels([panel.base[:2]]), 16.0))
        values.append(panel.base.accuracy)
    for value in values:
        level = float(pixels((1, value))[1])
        avoided.append(along(np.array([(box.x0, level), (box.x1, level)])))
    return LabelLayout(box.extents, np.concatenate(taken), np.concatenate(avoided))


def _clusters(panel: Panel, pixels: Any) -> list[tuple[str, list[tuple[float, float]]]]:
    """Labels of points, each once where several lines have it at about the same cost."""
    found: list[tuple[str, list[tuple[float, float]]]] = []
    for point in sorted((point for line in panel.lines.values() for point in line), key=lambda point: point[:2]):
        if not point.label:
            continue
        place = tuple(pixels(point[:2]))
        near = (own for text, own in found if text == point.label and abs(own[-1][0] - place[0]) < 30)
        if (cluster := next(near, None)) is None:
            found.append((point.label, [place]))
        else:
            cluster.append(place)
    return [(text, sorted(own, key=lambda place: place[1])) for text, own in found]


def _write(
    axes: Any,
    layout: LabelLayout,
    text: str,
    anchors: Sequence[tuple[float, float]],
    distances: Sequence[float] = (6, 12),
    *,
    above: bool = False,
    anywhere: bool = False,
    **look: Any,
) -> None:
    """Write a text beside one of the anchors (pixels); where there is no room, `anywhere`, or not at all."""
    if not text:
        return
    figure = axes.figure
    written = axes.annotate(text, (0, 0), xycoords="figure pixels", ha="center", va="center", **look)
    extent = written.get_window_extent(figure.canvas.get_renderer())
    box = layout.place(anchors, (extent.width, extent.height), distances, above=above, anywhere=anywhere)
    written.remove()
    if box is None:
        return
    middle = np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2])
    nearest = min(anchors, key=lambda anchor: float(np.hypot(*(middle - anchor))))
    if (gap := np.maximum(np.abs(middle - nearest) - (box[2:] - box[:2]) / 2, 0).max()) > LEADER:
        layout.avoid(along(np.array([nearest, middle])))
    place = axes.transData.inverted().transform(nearest)
    offset = tuple((middle - nearest) * 72 / figure.dpi)
    arrow = {"arrowstyle": "-", "color": look["color"], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
    axes.annotate(
        text,
        tuple(place),
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center",
        arrowprops=arrow if gap > LEADER else None,
        zorder=6,
        **look,
    )


def _light(name: str) -> str:
    return style.COLOURS[name].light
