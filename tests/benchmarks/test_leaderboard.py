"""The leaderboard: every entry is what its record or reference says, and its files are drawn from the entries."""

import csv
import json
import re

import pytest
import yaml
from scipy.stats import binomtest

from benchmarks import common, leaderboard
from benchmarks.leaderboard import ENTRIES, FOLDER, __main__
from dtem.errors import DtemError
from dtem.measure import record

FILES = sorted(ENTRIES.glob("*.yaml"))
MEASURED = next(file for file in FILES if "kind: measured" in file.read_text(encoding="utf-8"))
QUOTED = next(file for file in FILES if "kind: quoted" in file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def entries():
    """Reading checks every entry against its record."""
    return leaderboard.read_all()


def altered(tmp_path, file, **changes):
    content = {**yaml.safe_load(file.read_text(encoding="utf-8")), **changes}
    copy = tmp_path / "entry.yaml"
    copy.write_text(yaml.safe_dump({name: value for name, value in content.items() if value != "leave out"}))
    return copy


def test_every_entry_is_its_record_or_names_its_reference(entries):
    assert len(entries) == len(FILES)
    assert {entry.kind for entry in entries} == {"measured", "quoted"}
    assert all(
        (entry.reference or "").count("https://") == (entry.kind == "quoted") or entry.reference for entry in entries
    )


def test_csv_and_page_are_drawn_from_the_entries(entries):
    assert (FOLDER / "leaderboard.csv").read_text(encoding="utf-8") == __main__.as_csv(entries), (
        "run: python -m benchmarks.leaderboard"
    )
    assert (FOLDER / "index.html").read_text(encoding="utf-8") == __main__.as_page(entries), (
        "run: python -m benchmarks.leaderboard"
    )
    with (FOLDER / "leaderboard.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(entries)


def test_measured_and_quoted_are_never_ranked_together(entries):
    for (_, kind, data, convention), group in leaderboard.groups(entries).items():
        assert {(each.kind, each.data, each.convention) for each in group} == {(kind, data, convention)}
        front = [each for each in group if leaderboard.on_front(each, group)]
        assert front
        by_cost = sorted(front, key=lambda each: each.gflops)
        assert [each.top1 for each in by_cost] == sorted(each.top1 for each in front)


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (MEASURED, {"top1": 99.0}, "top1 = 99.0, but"),
        (MEASURED, {"gflops": 0.1}, "gflops = 0.1, but"),
        (MEASURED, {"interval": [1.0, 2.0]}, "interval ="),
        (MEASURED, {"hardware": "H100"}, "hardware = 'H100'"),
        (MEASURED, {"row": {"r": "no such"}}, "selects 0 rows"),
        (MEASURED, {"record": "leave out"}, "has a record and a row"),
        (MEASURED, {"reference": "a paper"}, "no reference"),
        (QUOTED, {"reference": "leave out"}, "has a reference"),
        (QUOTED, {"interval": [70.0, 80.0]}, "neither record, row nor interval"),
        (QUOTED, {"kind": "guessed"}, "kind = 'guessed'"),
        (QUOTED, {"convention": "flops"}, "convention = 'flops'"),
        (QUOTED, {"rate": 16}, "rate = 16 must be text"),
        (QUOTED, {"top1": "80"}, "top1 = '80'"),
        (QUOTED, {"model": "leave out"}, "lacks: model"),
        (QUOTED, {"speed": 3}, "unknown fields: speed"),
    ],
    ids=str,
)
def test_an_entry_that_differs_from_its_source_is_refused(tmp_path, file, changes, said):
    leaderboard.read(file)
    with pytest.raises(DtemError, match=said.replace("(", r"\(")):
        leaderboard.read(altered(tmp_path, file, **changes))


def test_the_example_of_the_guide_is_an_entry(tmp_path):
    guide = (FOLDER / "README.md").read_text(encoding="utf-8")
    copy = tmp_path / "entry.yaml"
    copy.write_text(re.search(r"```yaml\n(.*?)```", guide, re.S)[1])
    example = leaderboard.read(copy)
    assert example == leaderboard.read(ENTRIES / "frozen-mctf-16.yaml"), "copy that entry into README.md"


def test_entries_of_a_record_of_your_own(tmp_path, monkeypatch):
    """As `dtem compare --out` writes it."""
    rows = [{"method": "mine", "r": "0.65G", "top1": 70.5, "macs": 649_000_000, "paper": 655_000_000}]
    results = {"model": "deit_tiny_patch16_224", "images": 200, "rows": rows}
    record.save(record.collect("compare", results), tmp_path / "mine.json")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(__main__, "ENTRIES", tmp_path)
    __main__.add("mine", "two hundred photographs", "100 updates")
    (entry,) = leaderboard.read_all(tmp_path)
    assert (entry.method, entry.gflops, entry.training) == ("mine", 0.649, "100 updates")
    assert json.loads((tmp_path / "mine.json").read_text())["machine"]["cpu"] == entry.hardware


def test_photographs_of_an_own_record_must_be_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["leaderboard", "--add", "norms"])
    with pytest.raises(DtemError, match="say with --photographs"):
        __main__.main()


def test_the_same_entry_twice_is_refused(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_bytes(QUOTED.read_bytes())
    with pytest.raises(DtemError, match=r"b\.yaml and a\.yaml are the same entry"):
        leaderboard.read_all(tmp_path)


@pytest.mark.parametrize(("top1", "images"), [(72.2, 1000), (100.0, 50), (0.4, 250)])
def test_the_interval_is_wilson_s(top1, images):
    expected = binomtest(round(top1 * images / 100), images).proportion_ci(method="wilson")
    assert leaderboard.wilson(top1, images) == (round(100 * expected.low, 1), round(100 * expected.high, 1))
