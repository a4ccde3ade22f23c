"""`benchmarks.frozen` on digits: it trains what is missing, once, and its record has every row with its base."""

import json
import sys

import pytest

import dtem
from benchmarks import frozen, frozen_tables, frozen_training
from dtem.errors import DtemError
from dtem.methods import METHODS

ONLY = "ppt,ppt + norms,diffrate,diffrate + norms"


def run(monkeypatch, photographs, work, *more, train="train"):
    given = ["--data", photographs / "val", "--train", photographs / train, "--model", "digits_vit", "--work", work]
    given += ["--updates", "1", "--r", "3", "--only", ONLY, "--threads", "1", "--out", work / "frozen.json", *more]
    monkeypatch.setattr(sys, "argv", ["frozen", *map(str, given)])
    assert frozen.main() == 0
    return json.loads((work / "frozen.json").read_text())["results"]


def test_it_trains_what_is_missing_and_only_that(monkeypatch, photographs, tmp_path):
    runs = {}

    def train(model, data, *, preset, out, method, learn, r, **settings):
        """An adapter that learned nothing, as a run leaves it."""
        assert (preset, settings["updates"], settings["dtype"]) == ("adapter", 1, "bfloat16")
        assert len(list(data.glob("*/*"))) == 12
        handle = dtem.patch(model, method, norms="norms" in learn)
        runs[out.name] = (method, learn, r, settings.get("adapter", ""))
        out.mkdir(parents=True)
        handle.save_pretrained(out / "adapter.safetensors")
        (out / "record.json").write_text("{}")

    monkeypatch.setattr(dtem, "train", train)
    results = run(monkeypatch, photographs, tmp_path)
    (_, budget), (_, same) = (name.rsplit("-r", 1) for name in runs if name.startswith("diffrate"))
    assert budget == same == f"{results['budgets']['3']:.4f}G"
    assert runs == {
        f"ppt_+_norms-r{budget}": ("ppt", ["norms"], budget, ""),
        f"diffrate-r{budget}": ("diffrate", ["embeddings"], budget, ""),
        f"diffrate_+_norms-r{budget}": ("diffrate", ["norms"], "learned", runs[f"diffrate_+_norms-r{budget}"][3]),
    }
    assert runs[f"diffrate_+_norms-r{budget}"][3].endswith(f"diffrate-r{budget}/adapter.safetensors")
    rows = {row["variant"]: row for row in results["rows"]}
    assert set(rows) == {"unmerged", "tome", *ONLY.split(",")}
    assert (rows["ppt + norms"]["learned"], rows["ppt + norms"]["base"]) == ("norms", "ppt")
    assert rows["diffrate + norms"]["learned"] == "rates and norms"
    assert rows["ppt + norms"]["against_base"]["kl"] == [0, 0, 0]
    assert rows["diffrate + norms"]["plan"] == rows["diffrate"]["plan"], "norms leave the learned rates as they are"
    assert [line[0] for line in frozen_tables.norms(results)[1:]] == ["PPT", "DiffRate"]

    runs.clear()
    assert run(monkeypatch, photographs, tmp_path)["rows"] == results["rows"]
    assert not runs, "everything was there already"


def test_photographs_that_are_evaluated_are_not_learned_from(monkeypatch, photographs, tmp_path):
    with pytest.raises(DtemError, match=r"\d+ images are in --train and in --data, such as "):
        run(monkeypatch, photographs, tmp_path, train="val")


def test_an_unknown_variant_is_refused(monkeypatch, photographs, tmp_path):
    with pytest.raises(DtemError, match="--only 'ppt and norms' is no variant; choose from: tome, mctf"):
        run(monkeypatch, photographs, tmp_path, "--only", "ppt and norms")


def test_norms_are_tried_on_every_method_but_those_that_are_left_out():
    """A new method is listed here, or said to be left out and why (`frozen_training`)."""
    tried = {training.method for training in frozen_training.TRAININGS.values() if training.learn == "norms"}
    ablations = {"tome_soft", "tome_gumbel"}
    assert set(METHODS) - ablations - tried == {"algm", "ats", "patch_merger"}
