"""Reports as a browser shows them: nothing wider than a phone, and all text readable in both schemes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dtem.visualise import curves, html_page
from dtem.visualise.curves import Panel, Point
from dtem.visualise.html_page import Tile

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # selenium's own


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one of everything."""
    page = html_page.Page("a report")
    page.headline("2.0 × faster, 94.1 % instead of 95.0 %; ToMe at the same cost: 89.7 %.", "r = 16, batch 32")
    page.text("Some text. " * 20)
    lines = {
        name: [Point(0.6, value, "r=16", (value - 1, value + 1)), Point(0.9, value + 2, "r=8")]
        for name, value in (("tome", 69.9), ("dtem", 71.6))
    }
    panel = Panel(lines, Point(1.25, 74.4, "unmerged"))
    page.plot(curves.for_page([panel]), "one plot")
    page.plot(curves.for_page([panel, panel]), "two plots")
    tile = Tile(
        "dtem", Image.new("RGB", (300, 300), "#777"), "a class with a long name 80 %", True, "60 % of the tokens"
    )
    page.tiles([tile, tile._replace(method="tome", right=False), tile._replace(method="unmerged")], "pictures")
    page.table(["method", *["points against unmerged (95 %)"] * 6], [["tome", *["-2.60 (-3.97 … -1.23)"] * 6]] * 3)
    page.facts({"command": "dtem demo --model a_model_with_a_very_long_name_that_does_not_end --data some/folder"})
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.html(), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_report(
    report: Path, browser: Any, low_contrast: Callable[[str], list[Any]], width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(report.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    shown = browser.execute_script("""return ['wide', 'narrow'].filter(name =>
        document.querySelector(`.plot .${name}`).getClientRects().length)""")
    assert shown == ["narrow" if width < 600 else "wide"]
    assert low_contrast("h1, h2, p, th, td, text, figcaption, dt, dd, b, span") == []
    letters = browser.execute_script("""return [...document.querySelectorAll('.plot text')]
        .filter(e => e.getClientRects().length && !e.getAttribute('transform')?.includes('-90'))
        .map(e => e.getBoundingClientRect().height)""")
    assert min(letters) >= 8
    edges = browser.execute_script("""return [...document.querySelectorAll('.tile div')].map(e => {
        let own = e.getBoundingClientRect(), text = e.querySelector('span').getBoundingClientRect();
        return text.left >= own.left && text.right <= own.right && text.top >= own.top})""")
    assert edges == [True] * 3
