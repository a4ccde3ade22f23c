"""Revisions of models and adapters on the Hub, with a cache of two commits and no network."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import dtem
from dtem.adapters import storage
from dtem.cli import main
from dtem.errors import DtemError
from dtem.measure import record
from dtem.models import hub
from tasks.captioning.small import write_captioner

transformers = pytest.importorskip("transformers")
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
TIMM = "timm/test_vit.r160_in1k"


@pytest.fixture(autouse=True)
def _offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr(hub, "_reachable", lambda _url: False)
    monkeypatch.setattr(hub, "loaded", {})


def snapshot(root: Path, repository: str, revision: str) -> Path:
    """Folder of one revision in the cache of the Hub, as huggingface_hub lays it out."""
    folder = root / "cache" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMITS[revision])
    place = folder / "snapshots" / COMMITS[revision]
    place.mkdir(parents=True)
    return place


@pytest.fixture
def vits(tmp_path: Path) -> dict[str, torch.Tensor]:
    """``me/vit`` with other weights in each revision; a weight of each by revision."""
    weights = {}
    for revision in COMMITS:
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        )
        model = transformers.ViTForImageClassification(config)
        model.save_pretrained(snapshot(tmp_path, "me/vit", revision))
        weights[revision] = model.classifier.weight.detach().clone()
    return weights


def test_a_model_of_transformers_at_a_revision(vits: dict[str, torch.Tensor]) -> None:
    for revision, expected in (("v1", vits["v1"]), (None, vits["main"]), (COMMITS["v1"], vits["v1"])):
        model = dtem.create_model("hf:me/vit", revision=revision)
        assert torch.equal(model.classifier.weight, expected)
        commit = COMMITS.get(revision or "main", revision)
        assert model.hub_revision == f"me/vit@{commit}"
        assert hub.loaded == {"me/vit": commit}


def test_a_captioner_at_a_revision(tmp_path: Path) -> None:
    for revision in COMMITS:
        write_captioner(snapshot(tmp_path, "me/git", revision))
    model = dtem.create_model("hf:me/git", revision="v1")
    assert model.tokenizer("a dog").input_ids
    assert model.hub_revision == f"me/git@{COMMITS['v1']}"


@pytest.mark.parametrize("name", ["test_vit", f"hf-hub:{TIMM}"])
def test_a_model_of_timm_at_a_revision(name: str, tmp_path: Path) -> None:
    states = {}
    for revision in COMMITS:
        place = snapshot(tmp_path, TIMM, revision)
        model = timm.create_model("test_vit")
        states[revision] = model.head.weight.detach().clone()
        save_file(model.state_dict(), place / "model.safetensors")
        cfg = {"architecture": "test_vit", "num_classes": 1000, "pretrained_cfg": {"input_size": [3, 160, 160]}}
        (place / "config.json").write_text(json.dumps(cfg))
    for revision in ("v1", None):
        model = dtem.create_model(name, revision=revision)
        assert torch.equal(model.head.weight, states[revision or "main"])
        assert model.hub_revision == f"{TIMM}@{COMMITS[revision or 'main']}"
        assert dtem.patch(model, r=2).host.name == "test_vit"


def test_random_weights_have_no_revision(vits: dict[str, torch.Tensor]) -> None:
    assert getattr(dtem.create_model("hf:me/vit", pretrained=False), "hub_revision", None) is None
    assert getattr(dtem.create_model("test_vit", pretrained=False), "hub_revision", None) is None


def test_adapters_cards_and_records_name_the_commit(vits: dict[str, torch.Tensor], tmp_path: Path) -> None:
    handle = dtem.patch(dtem.create_model("hf:me/vit", revision="v1"), r=2)
    dtem.save_pretrained(handle, tmp_path / "a.safetensors", notes={"lr": "1"})
    header, _ = storage.read(tmp_path / "a.safetensors")
    assert header["notes"] == {"host_revision": f"me/vit@{COMMITS['v1']}", "lr": "1"}
    dtem.save_pretrained(handle, tmp_path / "folder")
    card = (tmp_path / "folder" / "README.md").read_text()
    assert f"on the weights me/vit@{COMMITS['v1']}." in card
    assert "base_model: me/vit\n" in card
    assert 'dtem.create_model("hf:me/vit")' in card

    shutil.copy(tmp_path / "a.safetensors", snapshot(tmp_path, "me/adapter", "main") / "dtem.safetensors")
    dtem.from_pretrained("me/adapter", dtem.create_model("hf:me/vit@v1"))
    record.save(record.collect("eval", {}, command=["dtem"]), tmp_path / "record.json")
    loaded = record.load_record(tmp_path / "record.json")
    assert loaded.revisions == {"me/vit": COMMITS["v1"], "me/adapter": COMMITS["main"]}
    content = json.loads((tmp_path / "record.json").read_text())
    del content["revisions"]  # as in records of dtem 0.3
    (tmp_path / "record.json").write_text(json.dumps(content))
    assert record.load_record(tmp_path / "record.json").revisions == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [("digits_vit", {}), ("seg_t_linear_16", {"pretrained": False}), ("test_vit", {"pretrained": False}), (".", {})],
)
def test_what_has_no_revision(name: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DtemError, match=r"revision = 'v1' is for .*; leave it out"):
        dtem.create_model(name, revision="v1", **options)


def test_a_revision_that_is_not_there(vits: dict[str, torch.Tensor]) -> None:
    with pytest.raises(DtemError, match="not in the cache"):
        dtem.create_model("hf:me/vit", revision="v9")


def test_on_the_command_line(vits: dict[str, torch.Tensor], tmp_path: Path) -> None:
    argv = ["bench", "--model", "hf:me/vit", "--revision", "v1", "--r", "2", "--method", "tome", "--batch-size", "1"]
    assert main([*argv, "--rounds", "1", "--out", str(tmp_path / "bench.json")]) == 0
    assert record.load_record(tmp_path / "bench.json").revisions == {"me/vit": COMMITS["v1"]}
