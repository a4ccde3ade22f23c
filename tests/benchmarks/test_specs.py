"""Spec files: what is refused, and that every one that is shipped can be planned at both scales."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_study import SPEC, study

from benchmarks.reproduce import cells, search, specs
from benchmarks.reproduce.specs import SCALES, find, names, parse
from benchmarks.reproduce.study_setup import StudySetup
from dtem import methods, schedule
from dtem.errors import DtemError


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_can_be_planned(name, scale, tmp_path):
    """Settings, methods, options, rates and claims all fit together, without any model or image."""
    spec = find(name)
    every = cells.expand(spec, scale)
    at_scale = spec.at(scale)
    model = {"name": "host"} if scale == "small" else {}
    setup = StudySetup(spec, scale, tmp_path, "data", model, {}, create=_never)
    rows = {cell.row for cell in every}
    dense = spec.task == "segmentation"
    for cell in every:
        assert not search.is_searched(cell) or search.key_of(cell)
        cell = search.at(cell, search.GRID[0]) if search.is_searched(cell) else cell
        config = setup.config(dataclasses.replace(cell, trained=False))
        methods.find(cell.method, dense).config_class(**config.options)
        assert config.method == cell.method
        assert cell.rates
        assert setup.model_of(cell)["name"]
    assert any(cell.trained for cell in every)
    assert {row for claim in at_scale.claims for row in claim.rows} <= rows
    rates = {rate for cell in every for rate in cell.rates}
    assert {rate for claim in at_scale.claims for rate in claim.at} <= rates
    assert at_scale.cost
    if scale == "full":
        assert at_scale.needs
        assert spec.paper.values == () or rows & {str(line[0]) for line in spec.paper.values}


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", SCALES)
def test_plans_by_block_hold(name, scale):
    """No block merges more than its limit, so that what is written is what runs. Patches of 16 at 224 × 224."""
    for cell in cells.expand(find(name), scale):
        plans = {*cell.rates.values(), *(str(cell.settings[key]) for key in ("r", "host_r") if key in cell.settings)}
        for plan in (plan for plan in plans if "/" in plan):
            wanted = [int(part) for part in plan.split("/")]
            resets = methods.find(cell.method).resets_each_block
            assert list(schedule.resolve(schedule.parse(plan), 196, len(wanted), resets)) == wanted, cell.name


def test_studies_share_their_trainings(tmp_path):
    def folder(study, row):
        spec = find(study)
        setup = StudySetup(spec, "small", tmp_path, "data", {"name": "host"}, {}, create=_never)
        (cell,) = (cell for cell in cells.expand(spec, "small", [0]) if cell.trained and cell.row == row)
        return setup.folder(cell)

    assert folder("r_sweep", "end-to-end") == folder("end_to_end", "dtem")
    assert folder("r_sweep", "modular") == folder("grouping", "dtem") == folder("data", "dtem, fraction = 1")


def _never(*_):
    raise AssertionError("no model is needed to plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "'colour' is not known"),
        ({"small": {"budget": 3}}, "'budget' is not known"),
        ({"small": {"sweep": {"temperature": 0.1}}}, "must be a list"),
        ({"task": "dancing"}, "'dancing' is not known"),
        ({"measure": "weight"}, "'weight' is not known"),
        ({"claims": [{"text": "x", "better": "a"}]}, "`better` and `than`"),
        ({"paper": {"columns": ["row", "rate", "top1"], "values": [["a", 16]]}}, "2 values for 3 columns"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(DtemError, match=message):
        parse("tiny", {**copy.deepcopy(SPEC), **change})


def test_a_file_is_named_in_its_errors(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("title: [")
    with pytest.raises(DtemError, match=r"bad\.yaml"):
        specs.load(path)
    path.write_text("title: x\n")
    with pytest.raises(DtemError, match=r"bad\.yaml.*finding"):
        specs.load(path)


def test_an_unknown_study_is_refused_with_all_names():
    with pytest.raises(DtemError, match="temperature"):
        find("nothing")


def test_cells_are_the_product_of_cells_sweep_and_seeds():
    every = cells.expand(study(), "small")
    assert [cell.name for cell in every if cell.trained] == [
        f"temperature = {value}, seed {seed}" for value in (0.1, 0.3) for seed in (0, 1)
    ]
    assert [(cell.row, cell.rates) for cell in every if not cell.trained] == [
        ("unmerged", {"": "0"}),
        ("tome", {"8": "8", "16": "16"}),
    ]
    assert {cell.seed for cell in cells.expand(study(), "small", [7])} == {7}
    assert len(cells.matching(every, "*seed 1")) == 2
    with pytest.raises(DtemError, match="matches no cell"):
        cells.matching(every, "nothing*")


def test_models_have_their_own_presets_and_rates():
    models = {
        "S": {"preset": "deit_small", "rates": {"tome": [11], "dtem": {"35 %": 12}}},
        "T": {"preset": "deit_tiny"},
    }
    every = cells.expand(study(full={"models": models, "cells": {"dtem": {}}}), "full")
    assert {(cell.row, cell.preset, *cell.rates.items()) for cell in every} == {
        ("S, unmerged", "deit_small", ("", "0")),
        ("S, tome", "deit_small", ("11", "11")),
        ("S, dtem", "deit_small", ("35 %", "12")),
        ("T, unmerged", "deit_tiny", ("", "0")),
        ("T, tome", "deit_tiny", ("8", "8"), ("16", "16")),
        ("T, dtem", "deit_tiny", ("8", "8"), ("16", "16")),
    }


def test_the_list_needs_no_torch():
    code = (
        "import sys; from benchmarks.reproduce.__main__ import main; main(['--list']); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in names())
