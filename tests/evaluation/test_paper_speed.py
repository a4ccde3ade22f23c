"""`dtem.benchmark_paper`: the rows of the paper's table, measured again."""

import csv
import json
from pathlib import Path

import pytest
import torch

import dtem
from dtem.cli import main
from dtem.errors import DtemError
from dtem.evaluation.paper_speed import HOSTS, ROWS
from dtem.evaluation.variants import UNMERGED

PAPER = Path(__file__).resolve().parent.parent / "data" / "paper" / "modular.csv"


def test_rows_are_those_of_the_paper() -> None:
    names = {"none": UNMERGED, "ToMe": "tome", "DTEM": "dtem"}
    with PAPER.open() as file:
        published = [row for row in csv.DictReader(file) if row["method"] in names]
    expected = {(row["model"], names[row["method"]], float(row["gflops"]), int(row["im_s"])) for row in published}
    assert {(model, method, gflops, speed) for model, method, _, gflops, speed in ROWS} == expected
    assert {model for model, *_ in ROWS} == set(HOSTS)


def test_the_recipe_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Its GFLOPs are those of the paper (which counts a little more than MACs, and rounds), so r is the paper's."""
    tiny = ["--batch-size", "1", "--rounds", "1", "--warmup", "0"]
    assert main(["bench", "--recipe", "paper", "--device", "cpu", "--model", "DeiT-S", *tiny, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["r"]) for row in rows] == [row[1:3] for row in ROWS if row[0] == "DeiT-S"]
    for row in rows:
        assert row["gflops"] == pytest.approx(row["paper_gflops"], rel=0.012)
        assert row["paper_speedup"] == pytest.approx(row["paper_images_per_second"] / 1390)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--recipe", "paper", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


def test_other_models_are_refused() -> None:
    with pytest.raises(DtemError, match=r"'deit_tiny' is not in the paper's throughput table; choose from DeiT-S"):
        dtem.benchmark_paper(["deit_tiny"], device="cpu")
