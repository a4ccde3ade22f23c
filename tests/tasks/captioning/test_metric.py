"""The metrics, pinned to scores that were computed elsewhere."""

import json
import shutil

import numpy as np
import pytest

from dtem.errors import DtemError
from dtem.tasks.captioning import metric
from dtem.tasks.captioning.captions import open_captions

pytest.importorskip("pycocoevalcap")
java = pytest.mark.skipif(shutil.which("java") is None, reason="the PTB tokenizer and METEOR need Java")


@java
def test_scores_are_those_of_the_coco_evaluation(data_dir):
    """The first caption of every test image against its other four, as in reference_scores.json."""
    folder = data_dir / "flickr8k"
    if not (folder / "reference_scores.json").is_file():
        pytest.skip(f"no Flickr8k in {data_dir}")
    pinned = json.loads((folder / "reference_scores.json").read_text())["scores"]
    items = open_captions(f"{folder / 'captions.json'}#test").items
    scores = metric.score(
        {item.name: item.captions[0] for item in items}, {item.name: item.captions[1:] for item in items}
    )
    for name, value in pinned.items():
        ours = name.replace("Bleu_", "BLEU-").replace("ROUGE_L", "ROUGE-L")
        assert scores.corpus[ours] == pytest.approx(100 * value, abs=1e-6), name
    for name in ("CIDEr", "ROUGE-L"):
        assert len(scores.each[name]) == len(items)
        assert np.mean(scores.each[name]) == pytest.approx(scores.corpus[name])


def test_without_java_every_score_says_so(monkeypatch):
    monkeypatch.setattr(metric.shutil, "which", lambda name: None)
    scores = metric.score({"a": "a dog ."}, {"a": ["the dog ."]})
    assert scores.corpus == dict.fromkeys(metric.NAMES, "needs Java")
    assert scores.each == {}


def test_a_java_that_does_not_run_is_none(monkeypatch, tmp_path):
    stub = tmp_path / "java"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metric.check() == dict.fromkeys(metric.NAMES, "needs Java")


def test_spice_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(metric.shutil, "which", lambda name: "/usr/bin/java")
    monkeypatch.setattr(metric, "_runs", lambda java: True)
    monkeypatch.setattr(metric, "CORENLP", "not-there.jar")
    assert metric.check() == {"SPICE": "needs Stanford CoreNLP"}
    assert "get_stanford_models" in metric.HELP["needs Stanford CoreNLP"]
    names = [name for names, _ in metric._scorers({})] if shutil.which("java") and not metric.check() else None
    assert names is None or ("SPICE",) in names


def test_spice_is_wired(monkeypatch):
    """With CoreNLP there, SPICE is asked, and its answer of every image is read."""

    class Spice:
        def compute_score(self, wanted, given):
            return 0.25, [{"All": {"f": 0.25}, "Color": {"f": 0.0}}]

    monkeypatch.setattr(metric, "check", dict)
    monkeypatch.setattr(metric, "_tokenized", lambda captions: {name: list(each) for name, each in captions.items()})
    monkeypatch.setattr(metric, "_scorers", lambda missing: [(("SPICE",), Spice())])
    scores = metric.score({"a": "a dog"}, {"a": ["the dog"]})
    assert scores.corpus["SPICE"] == 25.0
    assert scores.each["SPICE"] == [25.0]


def test_captions_of_other_images_are_refused():
    with pytest.raises(DtemError, match="same images"):
        metric.score({"a": "a dog"}, {"b": ["the dog"]})
