"""The explorer's results as HTML: a card for the unmerged model and one for each method, and the trade-off curve."""

import functools
from collections.abc import Sequence
from html import escape
from typing import Any

from PIL import Image

from dtem.app.explorer import UNMERGED, Result, interpolate, load_accuracies
from dtem.data.labels import class_name
from dtem.visualise import curves, groups, style

MEASURING = "measuring …"


def cards(result: Result) -> str:
    """Side by side: the image, and its groups by each method after every block, of which the page shows one."""
    visualisation = result.visualisation
    depth, patches = visualisation.depth, visualisation.grid[0] * visualisation.grid[1]
    foreground = visualisation.foreground
    share = "" if foreground is None else _foreground(float(foreground.sum()), float(foreground.mean()))
    plain = _picture(result, groups.data_uri(visualisation.plain()), "the image as the model gets it")
    parts = [_card(result, UNMERGED, "r = 0", plain, str(patches), share, result.tokens, visualisation.unmerged)]
    for name, view in visualisation.views.items():
        pictures, counts, shares = [], [], []
        for block in range(depth):
            frame = f'class="dtem-frame{" first" if block == (depth - 1) // 2 else ""}" data-block="{block + 1}"'
            alt = f"{name}, groups after block {block + 1}"
            pictures.append(_picture(result, groups.data_uri(visualisation.groups(name, block)), alt, frame))
            counts.append(f"<span {frame}>{view.num_groups(block)}</span>")
            if (tokens := visualisation.allocation(name, block)) is not None:
                shares.append(f"<span {frame}>{_foreground(tokens.foreground_tokens, tokens.share)}</span>")
        drawn = "".join(pictures), "".join(counts), "".join(shares)
        parts.append(_card(result, name, f"r = {view.r}", *drawn, view.tokens[-1], view.probabilities))
    refused = "".join(message(f"{name}: {reason}") for name, reason in result.refused.items())
    return f'<div class="dtem-cards">{"".join(parts)}</div>{refused}{_notes(result)}'


def message(text: str) -> str:
    """An error message instead of a result."""
    return f'<div class="dtem-message" role="alert">{escape(text)}</div>'


def examples(pictures: Sequence[Image.Image]) -> str:
    """Buttons with pictures."""
    buttons = "".join(
        f'<button type="button" data-index="{index}" aria-label="example {index + 1}">'
        f'<img src="{groups.data_uri(_thumbnail(picture))}" alt=""></button>'
        for index, picture in enumerate(pictures)
    )
    return f'<div class="dtem-examples"><p>or take an example</p>{buttons}</div>'


def curve(result: Result) -> str:
    """Accuracy against cost with the current point; for this image alone where no accuracies are known."""
    path = result.model.record
    if path is None:
        return _probability_curve(result)
    title, lines = load_accuracies(path)
    names = tuple(name for name in result.visualisation.views if name in lines)
    current = {}
    for name in names:
        point = interpolate([*lines[name], *lines[UNMERGED]], result.gflops[name], "")
        if point is not None:
            current[name] = point
    missing = [style.title(name) for name in result.visualisation.views if name not in lines]
    without = f" Not measured: {escape(', '.join(missing))}." if missing else ""
    plot = _plot(path, names, tuple(current.items())) if names else "<p>No accuracies of these methods are known.</p>"
    ringed = f" Ringed: r = {result.r}, straight between measured points." if current else ""
    note = f"{escape(title)}. Bars: 95 % interval of each accuracy.{ringed}{without}"
    return f'<h3>Accuracy and cost</h3><div class="dtem-curve">{plot}</div><p class="dtem-note">{note}</p>'


def _probability_curve(result: Result) -> str:
    """For this image alone: probability of the unmerged model's prediction against cost."""
    visualisation = result.visualisation
    predicted = int(visualisation.unmerged.argmax())
    base = curves.Point(result.gflops[UNMERGED], 100 * float(visualisation.unmerged[predicted]), UNMERGED)
    now = {
        name: curves.Point(result.gflops[name], 100 * float(view.probabilities[predicted]), "")
        for name, view in visualisation.views.items()
    }
    value = f"probability of {class_name(result.model.host, predicted)} (%)"
    drawn = curves.for_page([curves.Panel(result.probability_curves, base, now=now, value=value, least_span=20.0)])
    return (
        f'<h3>This image alone: probability and cost</h3><div class="dtem-curve">{drawn}</div>'
        f'<p class="dtem-note">Probability of the unmerged model\'s prediction as r grows. Ringed: r = {result.r}. For '
        "accuracy, run <code>dtem eval … --out DIR</code> and start with "
        "<code>dtem app … --record DIR/record.json</code>.</p>"
    )


@functools.lru_cache(maxsize=128)
def _plot(path: Any, names: Sequence[str], now: Sequence[tuple[str, curves.Point]]) -> str:
    lines = load_accuracies(path)[1]
    base = lines[UNMERGED][0]._replace(label=UNMERGED)
    return curves.for_page([curves.Panel({name: lines[name] for name in names}, base, now=dict(now))])


def _card(
    result: Result, name: str, r: str, pictures: str, count: str, share: str, tokens: int, probabilities: Any
) -> str:
    """Every card has the same rows, so that they stand at equal heights."""
    latency, speedup, time = "latency", "", MEASURING
    if result.latency is not None:
        timing = result.latency.timings[name]
        latency, milliseconds = f"batch of {result.latency.batch_size}", 1000 * timing.seconds
        time = f"{milliseconds:.{0 if milliseconds >= 100 else 1}f} ms"
        speedup = "1 ×" if name == UNMERGED else f"{timing.speedup.median:.2f} ×"
    facts = [
        ("groups", count, ""),
        *([("foreground", share, "")] if share else []),
        ("tokens left", str(tokens), ""),
        ("GFLOPs", f"{result.gflops[name]:.3g}", ""),
        (latency, time, ""),
        ("speed-up", speedup, "speed-up"),
    ]
    listed = "".join(f'<dt>{fact}</dt><dd class="{kind}">{value}</dd>' for fact, value, kind in facts)
    own = style.method_colours([name])[name]
    return (
        f'<div class="dtem-card" data-method="{escape(name)}" style="--own: var(--dtem-{own})">'
        f'<h3>{escape(style.title(name))}<small>{escape(r)}</small></h3><div class="dtem-picture">{pictures}</div>'
        f'<div><dl class="dtem-facts">{listed}</dl>{_bars(result, probabilities)}</div></div>'
    )


def _picture(result: Result, source: str, alt: str, frame: str = "") -> str:
    examples = result.model.examples
    square = 'style="image-rendering: pixelated" ' if examples and examples[0].width < 64 else ""
    return f'<img {frame} {square}src="{source}" alt="{escape(alt)}">'


def _bars(result: Result, probabilities: Any) -> str:
    best = probabilities.topk(min(5, len(probabilities)))
    rows = []
    for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        text = escape(class_name(result.model.host, index))
        rows.append(
            f'<div class="dtem-bar" style="--part:{100 * value:.1f}%"><span>{text}</span>'
            f"<span>{100 * value:.1f} %</span></div>"
        )
    return "".join(rows)


def _foreground(tokens: float, share: float) -> str:
    return f"{tokens:.1f} ({100 * share:.0f} %)"


def _thumbnail(picture: Image.Image, side: int = 160) -> Image.Image:
    """At most that large; a small one as it is."""
    small = picture.copy()
    small.thumbnail((side, side))
    return small


def _notes(result: Result) -> str:
    visualisation, latency = result.visualisation, result.latency
    notes = ["Groups are those after the chosen block, tokens those after the last one; GFLOPs count multiply-adds."]
    if latency is not None:
        notes.append(
            f"Latency is the median of one run in which all models took turns, on this machine "
            f"(batch of {latency.batch_size}, {latency.engine}); speed-ups are over the unmerged model of that run."
        )
    if visualisation.foreground is not None:
        count = f"{int(visualisation.foreground.sum())} of {len(visualisation.foreground)} patches"
        notes.append(f"Foreground: groups on these {count}, by {visualisation.foreground_by}.")
    if "dtem" in visualisation.views and result.model.adapter is None:
        notes.append("dtem is untrained for this model, so it merges exactly as tome does.")
    return f'<p class="dtem-note">{escape(" ".join(notes))}</p>'
