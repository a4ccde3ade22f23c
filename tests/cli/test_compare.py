"""`dtem compare` on a tiny random model and generated images."""

import json
from pathlib import Path

import pytest
from test_eval import CLASSES, MODEL, folder, host  # noqa: F401 - the fixture

import dtem
from dtem.cli import main
from dtem.measure import flops


def command(folder: Path, *more: object) -> list[str]:  # noqa: F811
    start = [
        "compare",
        "--model",
        MODEL,
        "--weights",
        folder / "w.safetensors",
        "--num-classes",
        CLASSES,
        "--batch-size",
        4,
    ]
    return [
        str(part) for part in (*start, "--data", folder / "images", "--timed-batch-size", "1", "--rounds", 2, *more)
    ]


def gflops() -> float:
    model = host()
    return flops.count(model, dtem.patch(model).host.image).macs / 1e9


def test_all_methods_meet_the_same_budget(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    budget = round(0.8 * gflops(), 4)
    more = ["--gflops", budget, "--adapter", f"dtem={folder / 'a.safetensors'}", "--out", tmp_path / "kept", "--json"]
    assert main(command(folder, *more)) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in document["rows"]}
    assert {"unmerged", "tome", "evit", "dtem"} <= rows.keys()
    for name in ("tome", "evit", "dtem"):
        assert rows[name]["macs"] <= budget * 1e9
        assert abs(rows[name]["off_budget"]) < 0.05  # a tiny model has coarse steps
        assert rows[name]["speedup"]["1"]["median"] > 0
        assert rows[name]["images_per_second_at"]["1"] > 0
    assert {pair["method"] for pair in document["against_tome"]} == rows.keys() - {"unmerged", "tome"}
    assert "give its adapter, dynamicvit=FILE" in document["not_compared"]["dynamicvit"]
    assert json.loads((tmp_path / "kept" / "record.json").read_text())["kind"] == "compare"


def test_the_tables_say_what_it_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(command(folder, "--gflops", f"{0.8 * gflops():.4f}", "--method", "tome,evit")) == 0
    cost = capsys.readouterr().out.partition("Cost")[2]
    assert "evit" in cost
    assert "off its budget" in cost


def test_a_budget_above_the_models_own_cost_is_refused(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(folder, "--gflops", "100", "--method", "tome")) == 2
    assert "a budget of 100 GFLOPs is more than the unmerged model takes (" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["0", "-1", "much", "0.1,"])
def test_a_budget_that_is_none_is_refused(
    folder: Path,  # noqa: F811
    budget: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(folder, f"--gflops={budget}")) == 2
    assert f"--gflops {budget} must be positive numbers" in capsys.readouterr().err
