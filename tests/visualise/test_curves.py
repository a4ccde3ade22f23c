"""The plot: every point in it, the same bytes every time, no window system and no global state."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dtem.errors import DtemError
from dtem.methods import list_methods
from dtem.visualise import curves, style
from dtem.visualise.curves import Panel, Point
from dtem.visualise.label_layout import overlaps

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")

from matplotlib.text import Text

LINES = {
    "tome": [Point(0.6, 69.9, "r=16", (68.5, 71.3)), Point(0.9, 73.6, "r=8", (72.8, 74.4))],
    "dtem": [Point(0.6, 71.6, "r=16"), Point(0.9, 73.9, "r=8")],
}
BASE = Point(1.25, 74.4, "unmerged")
BEGIN = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def figure_of(panel: Panel, size: tuple[float, float] = curves.WIDE) -> Any:
    return curves._figure([panel], "", size, below=False)


@pytest.mark.parametrize("form", curves.FORMATS)
def test_formats(form: str, tmp_path) -> None:
    path = tmp_path / f"curve.{form.upper()}"
    curves.save(LINES, path, base=BASE, title="DeiT-T")
    assert path.read_bytes().startswith(BEGIN[form])
    assert path.read_bytes() == curves.draw(LINES, base=BASE, title="DeiT-T", form=form)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_everything_is_drawn() -> None:
    text = curves.draw(LINES, base=BASE, title="A title", cost="GFLOPs (paper)", form="svg").decode()
    written = re.findall(r"<text[^>]*>(.*?)</text>", text)
    for word in ("ToMe", "DTEM", "unmerged", "A title", "GFLOPs (paper)", "top-1 accuracy (%)"):
        assert written.count(word) == 1
    assert written.count("r=16") == written.count("r=8") == 1  # once for both methods, whose cost is the same


def test_a_line_goes_from_cheap_to_dear_and_bars_span_the_intervals() -> None:
    axes = figure_of(Panel({"tome": LINES["tome"][::-1]})).axes[0]
    line = axes.get_lines()[0]
    assert line.get_xdata().tolist() == [0.6, 0.9]
    assert line.get_ydata().tolist() == [69.9, 73.6]
    bars = [segment[:, 1].tolist() for each in axes.collections for segment in each.get_segments()]
    assert np.allclose(bars, [[68.5, 71.3], [72.8, 74.4]])


def test_noise_does_not_fill_the_axis() -> None:
    close = {"tome": [Point(1, 96.4, "", (95.0, 97.4))], "dtem": [Point(1, 96.2, "", (94.8, 97.2))]}
    bottom, top = curves.value_limits(Panel(close))
    assert top - bottom >= 3 * 2.4
    assert bottom < 94.8
    assert 97.4 < top <= 101
    bottom, top = curves.value_limits(Panel({"tome": [Point(1, 70.0, ""), Point(2, 70.1, "")]}))
    assert top - bottom == pytest.approx(curves.LEAST_SPAN)
    bottom, top = curves.value_limits(Panel({"tome": [Point(1, 10.0, ""), Point(2, 70.0, "")]}))
    assert bottom < 10
    assert top > 70


def crowd(seed: int, methods: int, points: int) -> dict[str, list[Point]]:
    """Lines that run close to each other."""
    noise, names = np.random.default_rng(seed), list_methods()[:methods]
    cost, value = np.linspace(0.3, 1, points), np.linspace(60, 74, points)
    return {
        name: [
            Point(x, y + noise.normal(0, 0.8), f"r={16 - 2 * index}", (y - 1, y + 1))
            for index, (x, y) in enumerate(zip(cost, value, strict=True))
        ]
        for name in names
    }


@pytest.mark.parametrize("size", [curves.WIDE, curves.NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(("methods", "points"), [(2, 9), (4, 3), (8, 4)])
def test_labels_do_not_collide(size: tuple[float, float], methods: int, points: int) -> None:
    lines = crowd(methods, methods, points)
    now = {name: line[1]._replace(label="now") for name, line in list(lines.items())[:1]}
    figure = figure_of(Panel(lines, BASE, now=now, levels={"level": 65.0}), size)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert {style.title(name) for name in lines} | {"unmerged", "level"} <= set(texts)  # names are always there
    boxes = np.array([Text.get_window_extent(text).extents for text in axes.texts])  # without the line to the point
    assert not np.triu(overlaps(boxes, boxes), 1).any()
    left, bottom, right, top = axes.get_window_extent().extents
    assert (boxes[:, :2] >= [left, bottom]).all()
    assert (boxes[:, 2:] <= [right, top]).all()
    markers = axes.transData.transform([point[:2] for line in lines.values() for point in line])
    inside = (boxes[:, None, :2] < markers) & (markers < boxes[:, None, 2:])
    assert not inside.all(axis=2).any()


def test_a_page_has_both_widths_in_its_own_colours() -> None:
    drawn = curves.for_page([Panel(LINES, BASE)])
    assert re.findall(r'<div class="(wide|narrow)"><svg [^>]*viewBox="0 0 ([\d.]+)', drawn) == [
        ("wide", "460.8"),
        ("narrow", "259.2"),
    ]
    assert "#" not in re.sub(r"(href|id|clip-path|xlink)[^>]*", "", drawn), "all colours follow the scheme"
    assert "DejaVu" not in drawn


def test_no_global_state() -> None:
    code = (
        "import sys; from dtem.visualise import curves; assert 'matplotlib' not in sys.modules; "
        "curves.draw({'a': [curves.Point(1, 2, 'r')]}); print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_mistakes() -> None:
    with pytest.raises(DtemError, match=r"curve\.gif.*\.png"):
        curves.save(LINES, "curve.gif")
    with pytest.raises(DtemError, match="'gif'"):
        curves.draw(LINES, form="gif")
    with pytest.raises(DtemError, match="nothing to plot"):
        curves.draw({"tome": []})
