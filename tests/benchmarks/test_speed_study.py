"""Studies that count and time a model with random weights."""

import pytest
import timm
from tiny_study import study

from benchmarks.reproduce import cells, specs, speed, study_plots
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.study_setup import StudySetup
from benchmarks.reproduce.study_tables import study_tables


def test_each_method_is_counted_and_timed_against_the_unmerged_model(tmp_path, monkeypatch):
    def create(name, pretrained):
        assert not pretrained
        shape = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
        return timm.create_model("deit_tiny_patch16_224", **shape)

    monkeypatch.setattr(speed, "ROUNDS", {1: 2, 8: 2})
    small = {"preset": "few", "measure": "speed", "cells": {"dtem": {}}}
    spec = study(small=small, rates=[2, 4])
    setup = StudySetup(spec, "small", tmp_path, "", {"name": "tiny"}, {}, create=create)
    collected = speed.collect(setup, cells.expand(spec, "small"), ["dtem"])
    rows = {(row["row"], row["rate"]): row["metrics"] for row in collected.results["rows"]}
    assert len(rows) == 2 * (1 + 2 * 2)
    for batch in (1, 8):
        assert rows[f"unmerged, batch {batch}", ""]["speedup"] == 1
        macs = [rows[f"unmerged, batch {batch}", ""]["macs"], *(rows[f"tome, batch {batch}", r]["macs"] for r in "24")]
        assert macs == sorted(macs, reverse=True)
    (table,) = study_tables(spec, collected)
    assert table.caption.startswith("Random weights: timing and counting only.")
    assert study_plots.draw(spec, collected).startswith(b"<?xml")


@pytest.mark.parametrize("name", ["lvvit", "augreg384"])
def test_the_paper_s_larger_hosts_are_timed_at_small_scale(name, capsys):
    spec = specs.find(name)
    assert (spec.small.measure, spec.full.measure) == ("speed", "accuracy")
    assert main([name, "--plan"]) == 2
    assert "no cells to train" in capsys.readouterr().err
