"""The page that holds everything itself."""

from xml.etree import ElementTree

import pytest
from PIL import Image

from dtem.visualise import html_page
from dtem.visualise.html_page import Tile


def test_a_page_has_its_parts_in_order() -> None:
    page = html_page.Page("a < b")
    page.heading("One & only")
    page.text("first", "<second>")
    page.table(["name", "x"], [["a", "1"], ["<b>", "2"]])
    page.facts({"seed": "0"})
    texts = [text.strip() for text in ElementTree.fromstring(page.html()).itertext() if text.strip()]
    start = texts.index("One & only")
    assert texts[start:] == ["One & only", "first", "<second>", "name", "x", "a", "1", "<b>", "2", "seed", "0"]
    assert texts[0] == "a < b"


def test_figures_lose_what_names_other_places() -> None:
    page = html_page.Page("t")
    page.figure(
        '<?xml version="1.0"?><!DOCTYPE svg PUBLIC "x" "http://www.w3.org/dtd">\n'
        '<svg viewBox="0 0 1 1"><metadata><a href="https://example.org"/>\n</metadata><path d="M0 0"/></svg>',
        "what it is",
    )
    html = page.html()
    assert "http" not in html
    assert "<?xml" not in html
    figure = ElementTree.fromstring(html).find(".//figure")
    assert figure.find(".//path").attrib == {"d": "M0 0"}
    assert figure.find("figcaption").text == "what it is"


def test_tables_leave_out_empty_columns_and_fold_when_long() -> None:
    page = html_page.Page("t")
    page.table(["name", "empty", "text"], [["a", "", "more words than fit into a short cell"], ["b", "", ""]])
    page.table(["n"], [[str(index)] for index in range(html_page.FOLDED + 1)])
    first, second = ElementTree.fromstring(page.html()).findall(".//table")
    assert [cell.text for cell in first.iter("th")] == ["name", "text"]
    assert [cell.attrib for cell in first.iter("td")] == [{}, {"class": "text"}, {}, {"class": "text"}]
    [folded] = ElementTree.fromstring(page.html()).findall(".//details")
    assert folded.find(".//table").find(".//td").text == second.find(".//td").text == "0"


def test_predictions_stand_on_their_pictures() -> None:
    page = html_page.Page("t")
    page.headline("2 × faster", "at batch 32")
    small, large = Image.new("RGB", (20, 20)), Image.new("RGB", (400, 400))
    page.tiles([Tile("tome", small, "<cat> 80 %", False, "half"), Tile("dtem", large, "dog 90 %", True)], "a dog")
    root = ElementTree.fromstring(page.html())
    assert [each.text for each in root.findall(".//div[@class='headline']/p")] == ["2 × faster", "at batch 32"]
    tiles = root.findall(".//div[@class='tile']")
    assert [(tile.find("b").text, tile.find(".//span").text) for tile in tiles] == [
        ("ToMe", "✗ <cat> 80 %"),
        ("DTEM", "✓ dog 90 %"),
    ]
    assert [tile.find(".//img").attrib.get("class") for tile in tiles] == ["small", None]
    assert [tile.attrib["style"] for tile in tiles] == ["--own: var(--dtem-orange)", "--own: var(--dtem-blue)"]


def test_something_else_than_svg_is_refused() -> None:
    with pytest.raises(ValueError):
        html_page.Page("t").figure("no picture", "caption")
