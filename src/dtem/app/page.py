"""The explorer's results as HTML: a card for the unmerged model and one for each method, and the trade-off curve."""

import functools
from collections.abc import Sequence
from html import escape
from typing import Any

from dtem.app.explorer import UNMERGED, Cost, Model, Result, interpolate, load_accuracies
from dtem.data.labels import class_name
from dtem.errors import DtemError
from dtem.visualise import curves, groups, html_page, style

STYLE = (
    f"""{style.variables("body.dark { %s }")}{html_page.PLOT_STYLE}"""
    + """
.dtem-cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 235px), 1fr)); gap: 14px; }
.dtem-card { border: 1px solid var(--border-color-primary); border-radius: 10px; padding: 12px; min-width: 0;
  background: var(--background-fill-primary); max-width: 420px; }
.dtem-card h3 { margin: 0 0 8px; font-size: 1.05rem; display: flex; justify-content: space-between; gap: 8px; }
.dtem-card h3 small { font-weight: normal; opacity: 0.8; }
.dtem-card img { width: 100%; display: block; border-radius: 4px; margin: 0; }
.dtem-card img.square { image-rendering: pixelated; }
.dtem-facts { display: grid; grid-template-columns: 1fr auto; gap: 2px 10px; margin: 10px 0; font-size: 0.9rem; }
.dtem-facts dt { opacity: 0.8; } .dtem-facts dd { margin: 0; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.dtem-bar { position: relative; font-size: 0.85rem; padding: 2px 6px; margin: 2px 0; border-radius: 3px;
  display: flex; justify-content: space-between; gap: 8px; background: var(--background-fill-secondary); }
.dtem-bar::before { content: ""; position: absolute; inset: 0 auto 0 0; width: var(--part); border-radius: 3px;
  background: var(--color-accent); opacity: 0.28; }
.dtem-bar span { position: relative; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.dtem-bar span:last-child { flex-shrink: 0; }
.dtem-message { border: 1px solid #d97706; border-left-width: 5px; border-radius: 8px; padding: 12px 14px; }
.dtem-plot { background: var(--background-fill-primary); border: 1px solid var(--border-color-primary);
  border-radius: 10px; padding: 8px;
  max-width: 640px; }
.dtem-plot svg { width: 100%; height: auto; display: block; }
.dtem-note { opacity: 0.8; font-size: 0.85rem; margin: 6px 0; }
@media (max-width: 640px) {
  .dtem-cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .dtem-card { padding: 8px; } .dtem-facts, .dtem-bar { font-size: 0.75rem; } .dtem-facts { gap: 1px 4px; }
  .dtem-card:first-child { grid-column: 1 / -1; display: grid; grid-template-columns: 42% minmax(0, 1fr); gap: 0 10px; }
  .dtem-card:first-child h3 { grid-column: 1 / -1; } .dtem-card:first-child img { grid-row: span 7; }
  .dtem-card:first-child .dtem-facts { margin: 0 0 6px; }
  .dtem-plot { padding: 4px; }
}
#examples .grid-wrap, #examples .gallery-container { height: auto !important; min-height: 0 !important; }
#examples .grid-container { grid-template-columns: repeat(3, minmax(0, 1fr)) !important; padding-top: 30px; }
#examples .thumbnail-item { width: 100% !important; height: auto !important; aspect-ratio: 1; }
"""
)


def cards(result: Result, block: int) -> str:
    """Side by side: the image, and its groups after `block` (from 1) by each method."""
    visualisation, model = result.visualisation, result.model
    plain, size = groups.data_uri(visualisation.plain()), [("tokens at the end", str(result.tokens))]
    parts = [_card(model, UNMERGED, "r = 0", plain, result.costs[UNMERGED], visualisation.unmerged, size)]
    for name, view in visualisation.views.items():
        facts = [
            ("tokens at the end", str(view.tokens[-1])),
            (f"groups, block {block}", str(view.num_groups(block - 1))),
            *_allocation(result, name, block),
        ]
        picture = groups.data_uri(visualisation.groups(name, block - 1))
        parts.append(_card(model, name, f"r = {view.r}", picture, result.costs[name], view.probabilities, facts, block))
    refused = "".join(message(f"{name}: {reason}") for name, reason in result.refused.items())
    return f'<div class="dtem-cards">{"".join(parts)}</div>{refused}{_notes(result)}'


def message(text: str) -> str:
    """An error message instead of a result."""
    return f'<div class="dtem-message" role="alert">{escape(text)}</div>'


def curve(result: Result) -> str:
    """Accuracy against cost with the current point; a note where no accuracies are known."""
    path = result.model.record
    if path is None:
        return _probability_curve(result)
    title, lines = load_accuracies(path)
    names = tuple(name for name in result.visualisation.views if name in lines)
    current = {}
    for name in names:
        point = interpolate([*lines[name], *lines[UNMERGED]], result.costs[name].gflops, "")
        if point is not None:
            current[name] = point
    missing = [name for name in result.visualisation.views if name not in lines]
    without = f" Not measured: {escape(', '.join(missing))}." if missing else ""
    plot = _plot(path, names, tuple(current.items())) if names else "No accuracies of these methods are known."
    ringed = f" Ringed: r = {result.r}, straight between measured points." if current else ""
    return f'<div class="dtem-plot">{plot}</div><p class="dtem-note">{escape(title)}.{ringed}{without}</p>'


def _probability_curve(result: Result) -> str:
    """For this image alone: probability of the unmerged model's prediction against cost."""
    visualisation = result.visualisation
    predicted = int(visualisation.unmerged.argmax())
    base = curves.Point(result.costs[UNMERGED].gflops, 100 * float(visualisation.unmerged[predicted]), UNMERGED)
    now = {
        name: curves.Point(result.costs[name].gflops, 100 * float(view.probabilities[predicted]), "")
        for name, view in visualisation.views.items()
    }
    lines = {name: [_thin_labels(point, 8) for point in points] for name, points in result.probability_curves.items()}
    value = f"probability of {class_name(result.model.host, predicted)} (%)"
    drawn = curves.for_page([curves.Panel(lines, base, now=now, value=value)])
    return (
        f'<div class="dtem-plot">{drawn}</div><p class="dtem-note">This image alone: '
        f"probability of the unmerged model's prediction as r grows. Ringed: r = {result.r}. For accuracy, run "
        "<code>dtem eval … --out DIR</code> and start with <code>dtem app … --record DIR/record.json</code>.</p>"
    )


@functools.lru_cache(maxsize=128)
def _plot(path: Any, names: Sequence[str], now: Sequence[tuple[str, curves.Point]]) -> str:
    lines = {name: [_thin_labels(point) for point in line] for name, line in load_accuracies(path)[1].items()}
    base = lines[UNMERGED][0]._replace(label=UNMERGED)
    return curves.for_page([curves.Panel({name: lines[name] for name in names}, base, now=dict(now))])


def _thin_labels(point: curves.Point, step: int = 16) -> curves.Point:
    """Without its label, unless r is a multiple of `step`: there is no room for all of them."""
    r = point.label.removeprefix("r=")
    return point if r.isdigit() and int(r) % step == 0 else point._replace(label="")


def _card(
    model: Model,
    name: str,
    r: str,
    picture: str,
    cost: Cost,
    probabilities: Any,
    more: Sequence[tuple[str, str]],
    block: int | None = None,
) -> str:
    facts = [
        *more,
        ("GFLOPs (MACs)", f"{cost.gflops:.3g}"),
        ("latency", f"{cost.milliseconds:.1f} ms"),
    ]
    if name != UNMERGED:
        facts += [("unmerged, in turn", f"{cost.unmerged_milliseconds:.1f} ms"), ("speed-up", f"{cost.speedup:.2f} ×")]
    listed = "".join(f"<dt>{escape(fact)}</dt><dd>{escape(value)}</dd>" for fact, value in facts)
    alt = f"{name}, groups after block {block}" if block else "the image as the model gets it"
    square = ' class="square"' if model.examples and model.examples[0].width < 64 else ""
    return (
        f'<div class="dtem-card" data-method="{escape(name)}"><h3>{escape(name)}<small>{escape(r)}</small></h3>'
        f'<img{square} src="{picture}" alt="{escape(alt)}"><dl class="dtem-facts">{listed}</dl>'
        f"{_bars(model, probabilities)}</div>"
    )


def _bars(model: Model, probabilities: Any) -> str:
    best = probabilities.topk(min(5, len(probabilities)))
    rows = []
    for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        text = escape(class_name(model.host, index))
        rows.append(
            f'<div class="dtem-bar" style="--part:{100 * value:.1f}%"><span>{text}</span>'
            f"<span>{100 * value:.1f} %</span></div>"
        )
    return "".join(rows)


def _allocation(result: Result, name: str, block: int) -> list[tuple[str, str]]:
    shares = result.visualisation.allocation(name, block - 1)
    if shares is None:
        return []
    return [("on foreground", f"{shares.foreground_tokens:.1f} ({100 * shares.share:.0f} %)")]


def _notes(result: Result) -> str:
    visualisation = result.visualisation
    notes = []
    if visualisation.foreground is not None:
        count = f"{int(visualisation.foreground.sum())} of {len(visualisation.foreground)} patches"
        notes.append(f"Foreground ({count}): by {visualisation.foreground_by}.")
    if "dtem" in visualisation.views and result.model.adapter is None:
        notes.append("dtem is untrained for this model, so it merges exactly as tome does.")
    notes.append("Latency is of one image, measured on this machine in turns with the unmerged model, once for each r.")
    return f'<p class="dtem-note">{escape(" ".join(notes))}</p>'


def check_block(block: Any, depth: int) -> int:
    """The value of the block slider."""
    if not isinstance(block, int | float) or not 1 <= block <= depth:
        raise DtemError(f"block = {block!r} must be a number from 1 to {depth}")
    return int(block)
