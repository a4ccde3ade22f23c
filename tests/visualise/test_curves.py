"""The plot: every point in it, the same bytes every time, no window system and no global state."""

import re
import subprocess
import sys

import pytest

from dtem.errors import DtemError
from dtem.visualise import curves
from dtem.visualise.curves import Point

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")

LINES = {
    "tome": [Point(0.6, 69.9, "r=16"), Point(0.9, 73.6, "r=8")],
    "dtem": [Point(0.6, 71.6, "r=16"), Point(0.9, 73.9, "r=8")],
}
BASE = Point(1.25, 74.4, "unmerged")
BEGIN = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("form", curves.FORMATS)
def test_formats(form: str, tmp_path) -> None:
    path = tmp_path / f"curve.{form.upper()}"
    curves.save(LINES, path, base=BASE, title="DeiT-T")
    assert path.read_bytes().startswith(BEGIN[form])
    assert path.read_bytes() == curves.draw(LINES, base=BASE, title="DeiT-T", form=form)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_everything_is_drawn() -> None:
    text = curves.draw(LINES, base=BASE, title="A title", cost="GFLOPs (paper)", form="svg").decode()
    written = re.findall(r"<!-- (.*?) -->", text)
    for word in ("tome", "dtem", "unmerged", "A title", "GFLOPs (paper)", "top-1 accuracy (%)"):
        assert word in written
    assert written.count("r=16") == written.count("r=8") == 2


def test_a_line_goes_from_cheap_to_dear() -> None:
    figure = curves._figure({"tome": LINES["tome"][::-1]}, None, "", ("", ""), {})
    (line,) = figure.axes[0].get_lines()
    assert line.get_xdata().tolist() == [0.6, 0.9]
    assert line.get_ydata().tolist() == [69.9, 73.6]


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
