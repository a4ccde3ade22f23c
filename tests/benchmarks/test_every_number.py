"""Every number that was measured has a record: README, docs (but for api.md) and the cards of shipped weights.

* What stands between ``<!-- table: NAME -->`` or ``<!-- study: NAME -->`` and ``<!-- end -->`` is drawn from a record.
* Any other paragraph, list or table with a measured number says in a comment within it where its numbers come from:
  ``<!-- from: NAME, NAME -->`` names records, and each decimal number in the block is one of theirs, to the digits that
  are printed; ``<!-- from: setting -->`` says that the numbers are chosen, not measured, ``<!-- from: paper -->`` that
  the paper prints them, ``<!-- from: card -->`` that they stand in a card. A comment that stands alone is for the block
  after it.

What is checked is that a record has such a number, not which one it is: a wrong one of few digits may be in a large
record by chance.
"""

import functools
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import leaderboard, report, tables
from benchmarks.reproduce import specs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CARDS = (*sorted((ROOT / "src/dtem/adapters/shipped").glob("*.md")), ROOT / "src/dtem/models/assets/digits_vit.md")
PAGES = (ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "api.md"), *CARDS)
WITHOUT_RECORD = {"setting", "paper"}
MARKED = re.compile(r"<!-- (table|study): ([\w-]+) -->\n.*?<!-- end -->", re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
METADATA = re.compile(r"\A---\n.*?^---$", re.M | re.S)
"""Of a card: drawn from its record by `benchmarks.cards`, which test_docs_tables.py checks."""
FROM = re.compile(r"<!-- from: ([^>]+?) -->")
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINK = re.compile(r"\]\([^)]*\)|`[^`]*`|https?://\S+")
CONVENTION = re.compile(r"95 %|(?:Python|torch|transformers|timm|Apache-|Licence: Apache-) ?\d+\.\d+")
"""The level of intervals, and versions."""
DECIMAL = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\d)")
MEASURED = re.compile(r"\d[\d.,]* ?(?:%|points?\b|ms\b|[GM]B\b)|\b\d+ ?× (?:as|fast|less|more)|" + DECIMAL.pattern)
SCALES = {"%": 100.0, "M": 1e-6, "G": 1e-9}
"""By the unit that follows a number; a table has its units in its head, so that all are tried there."""


class Block(NamedTuple):
    """A paragraph, list or table outside of marked regions and code."""

    line: int
    text: str
    """Without comments, links and code."""
    origins: tuple[str, ...]
    """What its comment names."""

    @property
    def table(self) -> bool:
        return self.text.startswith("|")


def blocks(text: str) -> Iterator[Block]:
    """All blocks of a page."""
    blank = lambda match: "\n" * match[0].count("\n")  # noqa: E731
    text = FENCED.sub(blank, MARKED.sub(blank, METADATA.sub(blank, text)))
    line, waiting = 1, ()
    for part in re.split(r"(\n\s*\n)", text):
        origins = tuple(name.strip() for names in FROM.findall(part) for name in names.split(","))
        words = CONVENTION.sub("", LINK.sub("", COMMENT.sub("", part))).strip()
        if words:
            yield Block(line, words, origins or waiting)
            waiting = ()
        elif origins:
            waiting = origins
        line += part.count("\n")


def problems(text: str) -> list[str]:
    """What is wrong with the numbers of a page."""
    found = []
    for block in blocks(text):
        measured = DECIMAL.search(block.text) if block.table else MEASURED.search(block.text)
        if not block.origins:
            if measured:
                found.append(f"line {block.line}: {measured[0]!r} names no record: {block.text[:80]!r}")
            continue
        for name in block.origins:
            if name not in WITHOUT_RECORD | {"card"} and name not in records():
                found.append(f"line {block.line}: there is no record {name!r}")
        if WITHOUT_RECORD.intersection(block.origins):
            continue
        for match in DECIMAL.finditer(block.text):
            number, unit = match[0], block.text[match.end() :].lstrip()[:1]
            scales = {1.0, *SCALES.values()} if block.table else {1.0, SCALES.get(unit, 1.0)}
            in_card = "card" in block.origins and any(number in card.read_text(encoding="utf-8") for card in CARDS)
            if not in_card and not any(
                is_leaf(number, leaf, scales) for name in block.origins for leaf in leaves(name)
            ):
                found.append(f"line {block.line}: {number} is not in {', '.join(block.origins)}")
    return found


@functools.cache
def records() -> dict[str, Path]:
    """Files of all records, by name."""
    files = {path.stem: path for path in RESULTS.rglob("*.json")}
    return {**files, "digits_vit": ROOT / "src/dtem/models/assets/digits_vit.record.json"}


@functools.cache
def leaves(name: str) -> tuple[float, ...]:
    """All numbers of a record."""
    if name not in records():
        return ()
    return tuple(numbers_of(json.loads(records()[name].read_text(encoding="utf-8"))["results"]))


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))


def is_leaf(printed: str, leaf: float, scales: Collection[float]) -> bool:
    """Whether a printed number is `leaf`, rounded, in one of some units."""
    number, unit = float(printed.replace(",", "")), 10.0 ** -len(printed.partition(".")[2])
    return any(abs(leaf * scale - number) <= 0.5001 * unit for scale in scales)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_measured_number_has_its_record(page):
    found = problems(page.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_marked_table_is_drawn_from_its_record(page):
    text = page.read_text(encoding="utf-8")
    marks = MARKED.findall(text)
    assert len(marks) == len(re.findall(r"<!-- (?:table|study): ", text)), "a mark without its end"
    for kind, name in marks:
        if kind == "table":
            assert (RESULTS / f"{tables.TABLES[name][0]}.json").is_file(), name
        else:
            assert name in specs.names()
    assert tables.fill(text) == text
    if any(kind == "study" for kind, _ in marks):
        assert report.fill(text, report.load_records(RESULTS)[0]) == text


def test_every_record_is_used():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    used = {name for text in texts for block in blocks(text) for name in block.origins}
    used |= {tables.TABLES[name][0] for text in texts for kind, name in MARKED.findall(text) if kind == "table"}
    studies = {name for text in texts for kind, name in MARKED.findall(text) if kind == "study"}
    used |= {f"{name}-{scale}" for name in studies for scale in specs.SCALES}
    used |= {entry.record for entry in leaderboard.read_all() if entry.record}
    assert not {path.stem for path in RESULTS.rglob("*.json")} - used


def test_an_altered_digit_is_found():
    page = ROOT / "docs" / "research" / "methods.md"
    text = page.read_text(encoding="utf-8")
    assert not problems(text)
    for number, altered in (
        ("(1.140)", "(1.145)"),
        ("1.209 against", "1.609 against"),
        ("1.338 against", "1.398 against"),
    ):
        assert number in text
        assert problems(text.replace(number, altered, 1)), altered
    assert problems(text.replace("<!-- from: rivals -->", "", 1))
    assert problems(text.replace("<!-- from: rivals -->", "<!-- from: nothing -->", 1))
    assert tables.fill(text.replace("| 1.254 |", "| 1.255 |", 1)) != text.replace("| 1.254 |", "| 1.255 |", 1)


def test_what_counts_as_measured():
    assert not problems("A block removes 16 tokens, and images have 224 × 224 pixels. Python 3.11 or newer.\n")
    for text in (
        "It is 2.3 points above.",
        "It takes 51 ms.",
        "1.2 × faster",
        "| a | 1.5 |\n| --- | --- |",
        "CIDEr 37.7",
    ):
        assert problems(text + "\n"), text
        assert not problems(text + " <!-- from: setting -->\n"), text
        assert not problems("<!-- from: paper -->\n\n" + text + "\n"), text
    assert is_leaf("72.2", 72.175, {1.0})
    assert is_leaf("0.65", 648273024.0, {1e-9})
    assert not is_leaf("72.3", 72.175, {1.0})
