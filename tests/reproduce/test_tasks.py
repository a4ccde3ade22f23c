"""Studies of other tasks than classification, on tiny models and made-up images; and the pictures."""

import pytest
import torch

from dtem.hosts.segmenter import LinearDecoder, Segmenter, plain_encoder
from dtem.reproduce import answers, cells, pictures, running, summary, tables
from dtem.reproduce.bench import Bench
from dtem.tasks.captioning.loading import load
from dtem.tasks.captioning.metric import Scores
from dtem.training import captioning
from reproduce.conftest import bench_of, study
from tasks.captioning.small import write_captioner, write_pictures
from tasks.segmentation.scenes import folder


def finished(bench):
    every = cells.expand(bench.study, "small")
    running.run(bench, every, ["dtem"])
    return summary.collect(bench, every, ["dtem"])


def test_segmentation(tmp_path):
    def build(described, depth):
        assert described["task"] == "segmentation"
        torch.manual_seed(0)
        return Segmenter(plain_encoder(32, 3, 8, (32, 32)), LinearDecoder(32, 3), "tiny").eval()

    spec = study(
        task="segmentation",
        metric="miou",
        axis="gflops",
        rates={"0.4": "40%"},
        settings={"updates": 1, "batch": 3, "workers": 0, "relaxed": 3},
        small={"preset": "segmenter_few", "splits": {"train": "{data}", "eval": "{data}"}, "seeds": [0, 1]},
        paper={},
    )
    scenes = folder(tmp_path / "scenes")
    kept = finished(Bench(spec, "small", tmp_path / "work", build, str(scenes), {"name": "tiny"}, {}))
    rows = {row["row"]: row for row in kept.results["rows"]}
    assert set(rows) == {"unmerged", "tome", "dtem"}
    assert set(rows["dtem"]["against_reference"]) == {"miou"}
    assert "mIoU" in tables.tables(spec, kept)[0].columns


def test_captioning(tmp_path, monkeypatch):
    def scored(written, items):
        each = [float(len(caption)) for caption in written.captions.values()]
        written.scores = Scores(
            {"CIDEr": sum(each), "BLEU-4": 1.0, "SPICE": "no"}, {"CIDEr": each}, list(written.captions)
        )
        return written

    monkeypatch.setattr(captioning.metric, "check", dict)
    monkeypatch.setattr(captioning.evaluate, "scored", scored)
    write_pictures(tmp_path, ("train", "train", "train", "test", "test", "test"))
    write_captioner(tmp_path / "model")
    spec = study(
        task="captioning",
        metric="CIDEr",
        axis="gflops",
        rates=[9],
        settings={"updates": 1, "batch": 2, "workers": 0, "beams": 1, "longest": 4, "r": 9, "loss": "distill"},
        small={"preset": "git_base", "seeds": [0]},
        paper={},
    )
    build = lambda *_: load(str(tmp_path / "model"))  # noqa: E731
    data = f"{tmp_path}/captions.json?images={tmp_path}/images"
    bench = Bench(spec, "small", tmp_path / "work", build, data, {"name": "tiny"}, {})
    assert bench.splits["train"].endswith(f"captions.json#train?images={tmp_path}/images")
    kept = finished(bench)
    rows = {row["row"]: row for row in kept.results["rows"]}
    assert set(rows["dtem"]["against_reference"]) == {"loss", "CIDEr"}
    assert set(rows["dtem"]["metrics"]) >= {"CIDEr", "BLEU-4", "loss", "macs"}
    assert "tmp" not in str(kept), "no folder of this machine"


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
    bench = bench_of(spec, photographs, tmp_path / "work")
    kept = finished(bench)
    assert [row["row"] for row in kept.results["rows"]] == ["tome", "dtem"]
    assert all(0 < row["metrics"]["foreground"] < 100 for row in kept.results["rows"])
    written = pictures.draw(bench, cells.expand(spec, "small"), tmp_path / "drawn")
    assert len(written) == 3
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)


@pytest.mark.parametrize("key", ["16", "0/0/16", "40%", "kendall 200"])
def test_answers_have_names_that_files_can_have(tmp_path, key):
    path = answers.path_of(tmp_path, "classification", key)
    path.touch()
    assert path.parent == tmp_path
