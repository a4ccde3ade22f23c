"""Studies of other tasks than classification, on tiny models and made-up images; and the pictures."""

import pytest
import torch
from tiny_study import setup_of, study

from benchmarks.reproduce import cells, foreground, per_image_outcomes, runner, study_record
from benchmarks.reproduce.study_setup import StudySetup
from benchmarks.reproduce.study_tables import study_tables
from dtem.models.segmenter import LinearDecoder, Segmenter, plain_encoder
from dtem.tasks.captioning.metric import Scores
from dtem.training import captioning
from tasks.captioning.small import write_captioner, write_pictures
from tasks.segmentation.scenes import folder


def finished(setup):
    every = cells.expand(setup.study, "small")
    runner.run(setup, every, ["dtem"])
    return study_record.collect(setup, every, ["dtem"])


def test_segmentation(tmp_path):
    def create(name, **_):
        assert name == "tiny"
        torch.manual_seed(0)
        return Segmenter(plain_encoder(32, 3, 8, (32, 32)), LinearDecoder(32, 3), "tiny").eval()

    spec = study(
        task="segmentation",
        metric="miou",
        axis="gflops",
        rates={"0.4": "40%"},
        settings={"updates": 1, "batch_size": 3, "workers": 0, "relaxed": 3},
        small={"preset": "segmenter_few", "splits": {"train": "{data}", "eval": "{data}"}, "seeds": [0, 1]},
        paper={},
    )
    scenes = folder(tmp_path / "scenes")
    collected = finished(StudySetup(spec, "small", tmp_path / "work", str(scenes), {"name": "tiny"}, {}, create=create))
    rows = {row["row"]: row for row in collected.results["rows"]}
    assert set(rows) == {"unmerged", "tome", "dtem"}
    assert set(rows["dtem"]["against_reference"]) == {"miou"}
    assert "mIoU" in study_tables(spec, collected)[0].columns


def test_captioning(tmp_path, monkeypatch):
    def with_scores(outcomes, items):
        each = [float(len(caption)) for caption in outcomes.captions.values()]
        corpus = {"CIDEr": sum(each), "BLEU-4": 1.0, "SPICE": "no"}
        outcomes.scores = Scores(corpus, {"CIDEr": each}, list(outcomes.captions))
        return outcomes

    monkeypatch.setattr(captioning.metric, "check", dict)
    monkeypatch.setattr(captioning, "with_scores", with_scores)
    write_pictures(tmp_path, ("train", "train", "train", "test", "test", "test"))
    write_captioner(tmp_path / "model")
    spec = study(
        task="captioning",
        metric="CIDEr",
        axis="gflops",
        rates=[9],
        settings={
            "updates": 1,
            "batch_size": 2,
            "workers": 0,
            "num_beams": 1,
            "max_new_tokens": 4,
            "r": 9,
            "loss": "distill",
        },
        small={"preset": "git_base", "seeds": [0]},
        paper={},
    )
    data = f"{tmp_path}/captions.json?images={tmp_path}/images"
    setup = StudySetup(spec, "small", tmp_path / "work", data, {"name": str(tmp_path / "model")}, {})
    assert setup.splits["train"].endswith(f"captions.json#train?images={tmp_path}/images")
    collected = finished(setup)
    rows = {row["row"]: row for row in collected.results["rows"]}
    assert set(rows["dtem"]["against_reference"]) == {"loss", "CIDEr"}
    assert set(rows["dtem"]["metrics"]) >= {"CIDEr", "BLEU-4", "loss", "macs"}
    assert "tmp" not in str(collected), "no folder of this machine"


def test_pictures(photographs, tmp_path):
    spec = study(
        measure="pictures",
        metric="foreground",
        axis="rate",
        rates=[16],
        baselines=["tome"],
        small={"preset": "few", "images": 3, "seeds": [0]},
        paper={},
    )
    setup = setup_of(spec, photographs, tmp_path / "work")
    collected = finished(setup)
    assert [row["row"] for row in collected.results["rows"]] == ["tome", "dtem"]
    assert all(0 < row["metrics"]["foreground"] < 100 for row in collected.results["rows"])
    written = foreground.draw_pictures(setup, cells.expand(spec, "small"), tmp_path / "drawn")
    assert len(written) == 3
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)


@pytest.mark.parametrize("key", ["16", "0/0/16", "40%", "kendall 200"])
def test_outcomes_have_names_that_files_can_have(tmp_path, key):
    path = per_image_outcomes.outcomes_path(tmp_path, "classification", key)
    path.touch()
    assert path.parent == tmp_path
