"""Tables of README and docs agree with the records."""

from pathlib import Path

import pytest

from benchmarks import cards, tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_agree_with_the_records(page):
    text = page.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run: python -m benchmarks.tables"


def test_every_record_is_drawn_somewhere():
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert "<!-- table: " in (ROOT / "README.md").read_text(encoding="utf-8")
    for name, (source, _) in tables.TABLES.items():
        assert tables.render(name)
        assert f"<!-- table: {name} -->" in pages, source


@pytest.mark.parametrize("name", cards.BASE_MODELS)
def test_metadata_of_cards_agree_with_the_records(name):
    text = (cards.SHIPPED / f"{name}.md").read_text(encoding="utf-8")
    assert cards.with_metadata(name, text) == text, "run: python -m benchmarks.cards"


def test_the_changelog_begins_with_this_version():
    import dtem

    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == dtem.__version__
