"""The search of a learning rate on held-out training images, and cells that take it from there."""

import json
from pathlib import Path

import pytest
from tiny_study import setup_of, study

from benchmarks.reproduce import cells, image_splits, runner, search, study_record
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.study_tables import study_tables
from dtem.errors import DtemError


@pytest.fixture
def setup(photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "GRID", (1e-5, 1e-2))
    small = {"preset": "few", "seeds": [0, 1], "cells": {"dtem": {}, "other": {"lr": "searched", "updates": 1}}}
    return setup_of(study(small=small, rates=[16]), photographs, tmp_path / "work")


def test_a_searched_learning_rate_is_the_winner_of_the_search(setup):
    every = cells.expand(setup.study, "small")
    (first, second) = cells.matching(every, "other*")
    with pytest.raises(DtemError, match="--search first"):
        setup.config(first)
    assert runner.load_results(setup, first) is None
    (found,), table = search.search(setup, [first, second])
    assert search.search(setup, [first, second])[0] == [found], "what is there is not trained again"
    assert (found["row"], found["setting"]) == ("other", "lr")
    assert found["best"] == float(min(found["cross_entropy"], key=lambda lr: found["cross_entropy"][lr]))
    assert len(table.rows) == 1, "seed 0 decides for all"
    assert setup.config(first).lr == setup.config(second).lr == found["best"]
    assert [path.name for path in (setup.work / "search").glob("*.json")] == [search.search_file(setup, second).name]

    assert runner.run(setup, every, ["dtem"])
    collected = study_record.collect(setup, every, ["dtem"])
    rows = {row["row"]: row for row in collected.results["rows"]}
    assert rows["other"]["settings"]["lr"] == "searched", "the record says where the learning rate comes from"
    assert rows["other"]["training"] == {
        "updates": 1,
        "epochs": None,
        "batch": 4,
        "loss": "distill",
        "lr": found["best"],
    }
    table = study_tables(setup.study, collected)[0]
    column = {row[0]: row[table.columns.index("training")] for row in table.rows}
    assert column["dtem"] == "2 updates of 4, distill, lr 0.003"
    assert column["tome"] == ""
    assert "as the rows say" in table.caption


def test_cells_that_wait_for_a_search_are_left_out(setup, capsys):
    every = cells.expand(setup.study, "small", [0])
    runner.run(setup, cells.matching(every, "other*"), ["dtem"])
    assert "left out: other, seed 0" in capsys.readouterr().err
    assert "other, seed 0" in study_record.collect(setup, every, ["dtem"]).results["missing"]


def test_what_diverges_does_not_win(setup, monkeypatch):
    (cell,) = cells.matching(cells.expand(setup.study, "small", [0]), "other*")
    monkeypatch.setattr(search, "_held_out_loss", lambda setup, cell, lr, folder: None if lr < 1e-3 else 2.0)
    (found,), table = search.search(setup, [cell])
    assert found["best"] == 1e-2
    assert table.rows[0][-2:] == ("diverges", "2.0000")


def test_the_rate_of_what_learns_is_searched_where_none_says_so(setup):
    tuned = study(small={"cells": {"tome": {"method": "tome", "mode": "finetune"}, "dtem": {}}})
    found = {cell.row: search.key_of(cell) for cell in cells.expand(tuned, "small") if cell.trained}
    assert set(found.values()) == {"host_lr", "lr"}
    both = study(small={"cells": {"dtem": {"lr": "searched", "host_lr": "searched"}}})
    with pytest.raises(DtemError, match="one of them"):
        search.key_of(next(cell for cell in cells.expand(both, "small") if cell.trained))


def test_every_image_is_in_one_part_of_a_search(photographs, tmp_path):
    files = sorted((photographs / "train").glob("*/*"))
    parts = image_splits.hold_out(files, [Path("extra/0/1.png")])
    assert sorted(parts["held"] + parts["search"]) == sorted(parts["all"])
    assert len(parts["held"]) == max(2, len(files) // 8)
    folder = image_splits.link_parts(
        {name: [f for f in each if f in files] for name, each in parts.items()}, tmp_path / "x"
    )
    assert {len(list((folder / part).iterdir())) for part in parts} == {len({file.parent for file in files})}


def test_from_the_command_line(photographs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(search, "_held_out_loss", lambda setup, cell, lr, folder: abs(lr - 1e-4))
    command = [
        "modular",
        "--data",
        str(photographs),
        "--model",
        "digits_vit",
        "--work",
        str(tmp_path),
        "--updates",
        "1",
    ]
    command += ["--only", "paper's recipe*"]
    assert main([*command, "--plan"]) == 0
    assert "to search" in capsys.readouterr().out
    assert main([*command, "--search", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found["cross_entropy"]) == {"1e-06", "5e-06", "1e-05", "0.0001", "0.001"}
    assert found["best"] == 1e-4
    assert main([*command, "--plan"]) == 0
    assert "to search" not in capsys.readouterr().out
