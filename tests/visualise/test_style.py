"""Colours that can be read in both schemes, one per method, and drawings that follow the scheme."""

import re

import pytest

from dtem.methods import list_methods
from dtem.visualise import style
from dtem.visualise.style import COLOURS


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """By WCAG 2."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_black_and_white() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [name for name in COLOURS if name not in ("line", "page", "card")])
def test_every_colour_can_be_read_as_text(name: str, scheme: str) -> None:
    for ground in ("page", "card"):
        assert contrast(getattr(COLOURS[name], scheme), getattr(COLOURS[ground], scheme)) >= 4.5  # WCAG AA


def test_methods_have_colours_of_their_own() -> None:
    assert set(style.METHODS) - {"unmerged"} <= set(list_methods())
    assert len(set(style.METHODS.values())) == len(style.METHODS)
    for methods in (["tome", "dtem"], ["dtem", "diffrate", "tome", "mine"], ["a", "b", "dtem"]):
        colours = style.method_colours(methods)
        assert list(colours) == methods
        assert len(set(colours.values())) == len(methods)
        assert colours["dtem"] == "blue"
    assert style.method_colours(["dtem, r = 8", "dtem, r = 16"]) == {"dtem, r = 8": "blue", "dtem, r = 16": "orange"}


def test_names_are_written_as_their_papers_write_them() -> None:
    assert set(style.TITLES) <= set(list_methods())
    assert [style.title(name) for name in ("tome", "dtem, batch 8", "mine", "unmerged")] == [
        "ToMe", "DTEM, batch 8", "mine", "unmerged",
    ]  # fmt: skip


def test_a_drawing_follows_the_scheme() -> None:
    blue = COLOURS["blue"].light
    svg = f'<?xml version="1.0"?>\n<svg viewBox="0 0 9 9"><metadata>x</metadata><path style="fill: {blue}"/></svg>'
    assert style.themed(svg) == '<svg viewBox="0 0 9 9"><path style="fill: var(--dtem-blue)"/></svg>'
    alone = style.standalone(svg)
    assert re.findall(r"--dtem-blue: (#\w+);", alone) == [blue, COLOURS["blue"].dark]
    assert "prefers-color-scheme: dark" in alone
