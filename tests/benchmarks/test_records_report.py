"""The HTML report and the tables of the documentation."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import report
from benchmarks.reproduce import specs, study_record
from benchmarks.reproduce.__main__ import main as reproduce
from dtem.errors import DtemError
from dtem.measure import record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def records(tmp_path):
    """The record of a study that is shipped, with made-up numbers."""
    rows = []
    for name, setting in (("unmerged", None), ("tome", None), ("temperature = 0.1", 0.1), ("temperature = 0.3", 0.3)):
        for rate in ("",) if name == "unmerged" else ("8", "16"):
            between = {
                "top1": {"value": 0.5, "low": -0.1, "high": 1.1},
                "loss": {"value": -0.1, "low": -0.2, "high": 0.0},
            }
            rows.append(
                {
                    "row": name,
                    "rate": rate,
                    "r": rate or "0",
                    "trained": setting is not None,
                    "settings": {} if setting is None else {"temperature": setting, "fraction": 1.0},
                    "seeds": [0, 1],
                    "metrics": {"top1": 70.0, "cross_entropy": 1.2, "macs": 1e9, "paper": 1.1e9},
                    "by_seed": {"top1": [69.5, 70.5], "cross_entropy": [1.1, 1.3]},
                    "against_reference": between if setting else None,
                }
            )
    about = {"models": ["deit_tiny_patch16_224"], "training_images": 4000, "images": 1000, "updates": 150}
    about |= {"epochs": None, "batch": 32, "seeds": [0, 1], "dtype": "float32"}
    results = {"study": "temperature", "scale": "small", "about": about, "missing": [], "rows": rows, "claims": []}
    measured = record.collect(
        specs.STUDY_RECORD, results, command=["python", "-m", "benchmarks.reproduce", "temperature"]
    )
    record.save(measured, study_record.record_path(tmp_path, "temperature", "small"))
    return tmp_path


def test_the_report_holds_everything_itself(records, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert report.main(["--records", str(records), "--out", str(out)]) == 0
    text = out.read_text()
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert not re.search(r'(src|href)\s*=\s*"(?!#)', text), "nothing is fetched"
    assert "Bars: 95 % interval of the difference to tome. Dots: single seeds." in text
    assert "tokens merged in every block" not in text
    assert text.count("temperature of soft grouping</text>") == 4, "two metrics, for wide and for narrow pages"
    assert "<svg" in text
    assert all(specs.find(name).title.replace("'", "&#x27;") in text for name in specs.names())
    (line,) = re.findall("<p>Not yet measured: (.*?)</p>", text)
    assert len(line.split("; ")) == len(specs.names()) - 1, "all in one line"
    assert text.count("<h2>") == 1
    assert "Small scale: deit_tiny_patch16_224, trained for 150 updates of 32 from 4,000 images" in text


def test_other_records_are_there_too(records, tmp_path, capsys):
    rows = [
        {"model": "a", "speedup": {"median": 2.0, "low": 1.9, "high": 2.1}, "parts": {"encoder": 3}, "plan": [1, 2]}
    ]
    record.save(record.collect("speed", rows), records / "speed.json")
    record.save(record.collect(specs.CELL_RECORD, {}), records / "cell.json")
    (records / "captions.json").write_text("{}")
    assert report.main(["--records", str(records), "--out", str(tmp_path / "all.html")]) == 0
    assert capsys.readouterr().out.startswith("2 records")
    text = (tmp_path / "all.html").read_text()
    for cell in ("2 (1.9 … 2.1)", "parts encoder", "1, 2"):
        assert cell in text


def test_tables_of_a_page_follow_the_records(records, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n" + "".join(f"<!-- study: {name} -->\n<!-- end -->\n" for name in specs.names()))
    check = ["--records", str(records), "--docs", str(page), "--check"]
    assert report.main(check) == 1
    assert report.main(check[:-1]) == 0
    assert report.main(check) == 0
    text = page.read_text()
    assert "| temperature = 0.3 | 16 | 70.00 | 69.50, 70.50 | 1.2000 | +0.50 (-0.10 … +1.10) |" in text
    assert text.count("Not yet measured at small scale.") == len(specs.names()) - 1
    page.write_text(text.replace("70.00", "71.00", 1))
    assert report.main(check) == 1


def test_a_page_has_a_place_for_every_study():
    with pytest.raises(DtemError, match="no place for"):
        report.fill("<!-- study: temperature -->\n<!-- end -->", {})


def test_what_is_wrong_is_named(tmp_path, capsys):
    assert report.main(["--records", str(tmp_path / "nothing")]) == 2
    assert report.main(["--check"]) == 2
    assert reproduce(["nothing"]) == 2
    assert reproduce([]) == 2
    assert reproduce(["modular", "--scale", "full"]) == 2
    assert reproduce(["segmentation"]) == 2
    assert reproduce(["temperature", "--seeds", "one"]) == 2
    assert reproduce(["temperature", "--model", "deit_tiny_patch16_224"]) == 2
    errors = capsys.readouterr().err
    for words in ("no records", "--docs", "'nothing'", "--list", "--data", "--seeds one", "needs images"):
        assert words in errors


def test_the_documentation_is_in_step_with_the_records():
    text = (ROOT / "docs" / "research" / "results.md").read_text(encoding="utf-8")
    studies, others = report.load_records(ROOT / "benchmarks" / "results")
    assert "speed" in others
    assert report.fill(text, studies) == text, "run: python -m benchmarks.report --docs docs/research/results.md"


def test_plan_and_run_from_the_command_line(photographs, tmp_path, capsys):
    command = ["temperature", "--data", str(photographs), "--model", "digits_vit", "--work", str(tmp_path)]
    command += ["--updates", "1", "--seeds", "0"]
    assert reproduce([*command, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == 4
    assert reproduce([*command, "--only", "tome", "--out", str(tmp_path / "records")]) == 0
    assert "Small scale: digits_vit" in capsys.readouterr().out
    written = record.load_record(tmp_path / "records" / "temperature-small.json")
    assert len(written.results["missing"]) == 5, "the others are not run, and listed as missing"
    assert (tmp_path / "temperature" / "small" / "temperature-small.svg").is_file()
