"""Studies run once: finished cells are not run again, changed ones are, and stopped ones resume."""

import dataclasses
import json

import pytest
import timm
import torch
from tiny_study import SPEC, setup_of, study

import dtem
from benchmarks.reproduce import cells, image_splits, per_image_outcomes, runner, study_record
from benchmarks.reproduce.runner import load_results
from benchmarks.reproduce.study_tables import as_markdown, study_tables
from dtem.errors import DtemError
from dtem.measure import flops, record
from dtem.tasks.classification.outcomes import Outcomes


@pytest.fixture
def counted(monkeypatch):
    """How many trainings were begun."""
    calls = []
    real = runner.train
    monkeypatch.setattr(runner, "train", lambda *args, config: calls.append(config.out) or real(*args, config=config))
    return calls


def test_a_study_from_beginning_to_table(setup, photographs, counted):
    every = cells.expand(setup.study, "small", [0])
    runner.run(setup, every[:-1], ["dtem"])
    partly = study_record.collect(setup, every, ["dtem"])
    assert partly.results["missing"] == ["temperature = 0.3, seed 0"]
    assert len(counted) == 1
    runner.run(setup, every, ["dtem"])
    assert len(counted) == 2, "what was there is not run again"
    collected = study_record.collect(setup, every, ["dtem"])
    rows = {(row["row"], row["rate"]): row for row in collected.results["rows"]}
    assert set(rows) == {("unmerged", "")} | {
        (name, rate) for name in ("tome", "temperature = 0.1", "temperature = 0.3") for rate in ("8", "16")
    }
    assert rows["tome", "16"]["against_reference"] is None
    assert set(rows["temperature = 0.1", "16"]["against_reference"]) == {"top1", "loss"}
    assert collected.results["about"]["training_images"] == 16, "train and extra"
    assert [claim["rate"] for claim in collected.results["claims"]] == ["8", "16", "16"]
    text = "\n".join(map(as_markdown, study_tables(setup.study, collected)))
    assert "Small scale: digits_vit" in text
    assert "Not to be compared" in text
    assert text.count("Small scale") == 2, "every table of numbers that were measured says so"
    assert "Printed in the paper, full scale: DeiT-S" in text

    again = setup_of(study(title="Renamed", rates=[8, 12]), photographs, setup.work)
    runner.run(again, cells.expand(again.study, "small", [0]), ["dtem"])
    assert len(set(counted)) == 2, "another rate needs another evaluation, no other training"
    changed = setup_of(study(settings={"batch_size": 4, "updates": 1, "workers": 0}), photographs, setup.work)
    (cell,) = cells.matching(cells.expand(changed.study, "small", [0]), "*0.3*")
    assert load_results(changed, cell) is None
    runner.run(changed, [cell], ["dtem"])
    assert len(set(counted)) == 3, "other settings are another cell"


def tiny_vit():
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
    return timm.create_model("deit_tiny_patch16_224", **shape).eval()


def test_a_method_that_keeps_another_number_of_tokens_in_each_image_costs_their_mean(photographs, tmp_path):
    plan = "0/0/0/1/1/1/1/1/1/1/1/1"
    ats = {"method": "ats", "mode": "finetune", "trim": True, "r": plan, "rates": {"16": plan}}
    small = {"preset": "few", "cells": {"ats": ats}, "seeds": [0]}
    spec = study(small=small, baselines=["unmerged"], settings={"batch_size": 4, "updates": 1, "workers": 0}, paper={})

    def create(name, **_):
        return tiny_vit()

    setup = dataclasses.replace(setup_of(spec, photographs, tmp_path), create=create)
    runner.run(setup, cells.expand(spec, "small"), ["dtem"])
    rows = {
        row["row"]: row["metrics"]
        for row in study_record.collect(setup, cells.expand(spec, "small"), []).results["rows"]
    }
    padded = flops.count(dtem.patch(tiny_vit(), "ats", r=plan).model, (3, 32, 32))
    assert rows["ats"]["macs"] < padded.macs
    assert rows["ats"]["macs"] < rows["ats"]["paper"] < padded.paper


def test_a_record_of_other_settings_is_not_taken(setup):
    (cell,) = cells.matching(cells.expand(setup.study, "small"), "tome")
    runner.run(setup, [cell], ["dtem"])
    path = setup.folder(cell) / runner.RECORD
    assert load_results(setup, cell) is not None
    content = json.loads(path.read_text())
    content["results"]["identity"]["method"]["name"] = "evit"
    path.write_text(json.dumps(content))
    assert load_results(setup, cell) is None


def test_a_stopped_training_goes_on(setup, monkeypatch):
    (cell,) = cells.matching(cells.expand(setup.study, "small", [1]), "*0.3*")
    evaluate = runner._evaluate
    monkeypatch.setattr(runner, "_evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        runner.run(setup, [cell], ["dtem"])
    monkeypatch.setattr(runner, "_evaluate", evaluate)
    before = (setup.folder(cell) / "run" / "log.jsonl").read_text()
    runner.run(setup, [cell], ["dtem"])
    assert load_results(setup, cell) is not None
    assert (setup.folder(cell) / "run" / "log.jsonl").read_text() == before, "no update was made twice"


def test_a_cell_that_another_run_has_taken_is_left_to_it(setup):
    (cell,) = cells.matching(cells.expand(setup.study, "small"), "tome")
    folder = setup.folder(cell)
    with runner._locked(folder, True, wait=False) as first, runner._locked(folder, True, wait=False) as second:
        assert (first, second) == (True, False)
    with runner._locked(folder, True, wait=False) as later:
        assert later


def test_options_of_the_study_are_for_methods_that_know_them(photographs, tmp_path):
    spec = study(settings={"batch_size": 4, "updates": 1, "init": "random"})
    setup = setup_of(spec, photographs, tmp_path)
    tome, ours = (next(c for c in cells.expand(spec, "small") if c.method == name) for name in ("tome", "dtem"))
    assert setup.config(tome).options == {}
    assert setup.config(ours).options["init"] == "random"
    own = study(small={"cells": {"tome": {"method": "tome", "mode": "finetune", "init": "random"}}})
    cell = next(c for c in cells.expand(own, "small") if c.trained)
    with pytest.raises(DtemError, match="'init'"):
        setup_of(own, photographs, tmp_path).untrained(cell)


def test_a_part_of_the_images_is_drawn_by_its_seed(photographs, tmp_path):
    all_images = image_splits.training_images(str(photographs / "train"), 1.0, 0, tmp_path)
    parts = {
        (part, seed): set(
            image_splits.image_names(image_splits.training_images(str(photographs / "train"), part, seed, tmp_path))
        )
        for part, seed in ((0.25, 0), (0.5, 0), (0.5, 1))
    }
    assert len(image_splits.image_names(all_images)) == 16
    assert [len(part) for part in parts.values()] == [4, 8, 8]
    assert parts[0.25, 0] < parts[0.5, 0]
    assert parts[0.5, 0] != parts[0.5, 1]
    with pytest.raises(DtemError, match="fraction"):
        image_splits.training_images(str(photographs / "train"), 0.0, 0, tmp_path)


def test_rank_correlations_are_a_study(photographs, tmp_path):
    spec = study(
        measure="kendall",
        metric="kendall",
        reference="before",
        axis="rate",
        settings={"batch_size": 4, "updates": 1, "init": "random"},
        baselines={"before": {"method": "dtem", "seeded": True}},
        cells={"after": {}},
        rates={"first": "1-4", "rest": "5-12"},
        small={"preset": "few", "images": 4, "seeds": [0]},
        paper={},
    )
    setup = setup_of(spec, photographs, tmp_path)
    every = cells.expand(spec, "small")
    runner.run(setup, every, ["dtem"])
    collected = study_record.collect(setup, every, ["dtem"])
    assert [(row["row"], row["rate"]) for row in collected.results["rows"]] == [
        (name, rate) for name in ("before", "after") for rate in ("first", "rest")
    ]
    assert all(-1 <= row["metrics"]["kendall"] <= 1 for row in collected.results["rows"])
    assert set(collected.results["rows"][2]["against_reference"]) == {"kendall"}
    (table,) = study_tables(spec, collected)
    assert "Kendall's τ" in table.columns


def test_intervals_grow_with_what_seeds_do():
    torch.manual_seed(0)
    each = torch.randn(3, 500)
    one, alike = per_image_outcomes.over_seeds(each[:1]), per_image_outcomes.over_seeds(each[:1].repeat(3, 1))
    assert one.high - one.low == pytest.approx(alike.high - alike.low), "the same run thrice tells no more than once"
    apart = per_image_outcomes.over_seeds(each[:1] + torch.tensor([[-1.0], [0.0], [1.0]]))
    assert apart.value == pytest.approx(one.value)
    assert apart.high - apart.low > 5 * (one.high - one.low)


def test_images_are_compared_by_name():
    labels, loss = torch.arange(4), torch.rand(4)
    predicted = torch.arange(4)[:, None].repeat(1, 5)
    first = Outcomes(list("abcd"), labels, predicted, loss)
    turned = Outcomes(list("dcba"), labels.flip(0), predicted.flip(0), loss.flip(0))
    assert per_image_outcomes.compare("classification", "top1", [first], [turned])["loss"]["high"] == 0
    other = Outcomes(list("abce"), labels, predicted, loss)
    with pytest.raises(DtemError, match="same images"):
        per_image_outcomes.compare("classification", "top1", [first], [other])


@pytest.mark.parametrize(
    ("top1", "loss", "alike", "expected"),
    [
        ((0.1, 2.0), (-0.1, 0.1), False, "yes"),
        ((-2.0, -0.1), (-0.1, 0.1), False, "no: the other way round"),
        ((-1.0, 1.0), (-0.2, -0.1), False, "in the loss only"),
        ((-1.0, 1.0), (0.1, 0.2), False, "no: the loss says the other way round"),
        ((-1.0, 1.0), (-0.1, 0.1), False, "not clear"),
        ((-1.0, 1.0), (-0.1, 0.1), True, "no difference can be seen"),
        ((0.1, 1.0), (-0.1, 0.1), True, "no: they differ"),
    ],
)
def test_verdicts(top1, loss, alike, expected):
    differences = {"top1": _difference(*top1), "loss": _difference(*loss)}
    assert per_image_outcomes.verdict(differences, "top1", alike) == expected


def _difference(low, high):
    return {"value": (low + high) / 2, "low": low, "high": high}


def test_claims_are_those_that_the_study_makes_now():
    """A record keeps the claims of its day: what a study no longer states is not shown, the rest in its words."""
    (kept, dropped), between = study().small.claims, {"top1": _difference(0.1, 1.0)}
    tested = [
        {"text": "of its day", "rows": list(claim.rows), "alike": bool(claim.alike), "rate": "16"}
        | {"difference": between, "verdict": "yes"}
        for claim in (kept, dropped)
    ]
    about = {"models": ["host"], "training_images": None, "images": 50, "updates": 2, "epochs": None}
    about |= {"batch": 4, "seeds": [], "dtype": "float32"}
    results = {"study": "tiny", "scale": "small", "about": about, "missing": [], "rows": [], "claims": tested}
    now = study(small={**SPEC["small"], "claims": [{"text": "new words", "better": kept.better, "than": kept.than}]})
    table = next(t for t in study_tables(now, record.collect("reproduce", results)) if "statement" in t.columns)
    assert [row[0] for row in table.rows] == ["new words"]


def test_full_scale_stands_beside_the_paper():
    spec = study()
    row = {"row": "temperature = 0.1", "rate": "16", "r": "16", "trained": True, "settings": {}, "seeds": [0]}
    metrics = {"top1": 79.0, "cross_entropy": 0.9, "macs": 2.3e9, "paper": 2.34e9}
    row |= {"metrics": metrics, "by_seed": {"top1": [79.0]}, "against_reference": None}
    about = {"models": ["deit_small"], "training_images": 1000, "images": 50, "updates": None, "epochs": 30}
    about |= {"batch": 1024, "seeds": [0], "dtype": "float32"}
    results = {"study": "tiny", "scale": "full", "about": about, "missing": [], "rows": [row], "claims": []}
    collected = record.collect("reproduce", results)
    (table,) = study_tables(spec, collected)
    line = dict(zip(table.columns, table.rows[0], strict=True))
    assert (line["top-1 %: paper"], line["measured"], line["difference"]) == ("79.50", "79.00", "-0.50")
    assert line["GFLOPs: paper"] == "2.35"
    assert line["counted as the paper does"] == "2.34"
    assert table.rows[1][:4] == ("temperature = 0.7", "16", "70.00", "not measured")
    (matrix,) = study_tables(dataclasses.replace(spec, layout="matrix"), collected)
    assert matrix.rows == (("temperature = 0.1", "79.50", "79.00", "-0.50"),)
