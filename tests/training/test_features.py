"""Encoders without a classifier: they learn from their own features, and are judged by nearest neighbours."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem
from contract.hosts import lively
from dtem.cli import main
from dtem.data import loader, sources, transforms
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError
from dtem.training.config import TrainConfig

from .test_loop import train

MODEL = "test_vit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a classifier; a bank of pictures in 3 classes, others to be judged on, and some without labels."""
    root = tmp_path_factory.mktemp("features")
    torch.manual_seed(0)
    save_file(lively(timm.create_model(MODEL, num_classes=3)).state_dict(), root / "w.safetensors")
    random = np.random.default_rng(0)
    for split, each in (("bank", 4), ("val", 2), ("photos", 4)):
        for number in range(3 * each):
            label = number % 3
            place = root / split / (str(label) if split != "photos" else "")
            place.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (10, 10, 3), dtype=np.uint8) // 2 + 40 * label
            Image.fromarray(pixels).resize((160, 160)).save(place / f"{split}{number}.png")
    return root


def encoder(folder: Path) -> torch.nn.Module:
    from dtem.models.weights import load_weights

    model = timm.create_model(MODEL, num_classes=0).eval()
    load_weights(model, folder / "w.safetensors")
    return model


def settings(folder: Path, out: Path, **changes):
    plain = {"mixup": 0.0, "cutmix": 0.0, "auto": "", "erasing": 0.0, "crop": "none", "flip": False, "workers": 0}
    base = {
        "data": str(folder / "photos"),
        "out": str(out),
        "loss": "distill",
        "batch_size": 12,
        "updates": 12,
        "r": "30",
    }
    return TrainConfig.from_dict({**plain, **base, "lr": 1e-2, **changes})


def test_features_are_learned_without_labels(folder: Path, tmp_path: Path) -> None:
    model = encoder(folder)
    handle = train(model, settings(folder, tmp_path / "run")).handle
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert 0 < losses[0] < 2, "1 − cosine"
    assert min(losses[-3:]) < 0.9 * losses[0]
    # The first loss is that of untrained embeddings, softly merged, against the host's own features.
    batches = loader.Loader(
        sources.open_source(str(folder / "photos")), transforms.eval_transform(resolve_data_config(encoder(folder))), 12
    )
    images = next(iter(batches.epoch(0))).images
    plain, soft = encoder(folder), dtem.patch(encoder(folder), r=30)
    soft.mode = "soft"
    with torch.no_grad():
        cosine = torch.nn.functional.cosine_similarity(soft.model(images), plain(images))
    assert losses[0] == pytest.approx(float(1 - cosine.mean()), abs=1e-4)
    assert handle.model.num_classes == 0


def test_labels_that_the_model_has_no_classes_for_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, tmp_path, data=str(folder / "bank"), mixup=0.8, cutmix=1.0, updates=1)
    assert train(encoder(folder), config).updates == 1


@pytest.mark.parametrize("changes", [{"loss": "task"}, {"loss": "both"}, {"eval_data": "bank"}])
def test_what_needs_a_classifier_is_refused(folder: Path, tmp_path: Path, changes: dict[str, str]) -> None:
    changes = {name: str(folder / value) if name == "eval_data" else value for name, value in changes.items()}
    with pytest.raises(DtemError, match=r"no classifier.*loss = 'distill'.*--knn"):
        train(encoder(folder), settings(folder, tmp_path / "no", data=str(folder / "bank"), **changes))


def test_nearest_neighbours_at_each_r(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", "--model", MODEL, "--weights", folder / "w.safetensors", "--data", folder / "val"]
    argv += ["--knn", folder / "bank", "--num-neighbours", 3, "--r", "8", "--batch-size", 4, "--json"]
    assert main([str(part) for part in argv]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["r"]) for row in rows] == [("unmerged", "0"), ("tome", "8")]
    for row in rows:
        model = encoder(folder)
        if row["method"] == "tome":
            dtem.patch(model, "tome", 8)
        assert row["top1"] == pytest.approx(100 * _accuracy(model, folder))


def _accuracy(model: torch.nn.Module, folder: Path) -> float:
    """The share of pictures that most of their three nearest ones, by votes, are right about: with loops."""
    config = resolve_data_config(model)
    known = {}
    for split in ("bank", "val"):
        batches = loader.Loader(sources.open_source(str(folder / split)), transforms.eval_transform(config), 64)
        batch = next(iter(batches.epoch(0)))
        with torch.no_grad():
            known[split] = torch.nn.functional.normalize(model(batch.images), dim=1), batch.labels.tolist()
    right = 0
    for feature, label in zip(*known["val"], strict=True):
        cosines = (known["bank"][0] @ feature).tolist()
        best = sorted(range(len(cosines)), key=lambda index: -cosines[index])[:3]
        votes = [0.0, 0.0, 0.0]
        for index in best:
            votes[known["bank"][1][index]] += float(np.exp((cosines[index] - 1) / 0.07))
        right += votes.index(max(votes)) == label
    return right / len(known["val"][1])
