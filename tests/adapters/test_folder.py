"""An adapter as a folder: config.json, adapter.safetensors and a model card, there and back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants

import dtem
from adapters.test_storage import BASE_MODEL, FOLDER, run, tiny, trained
from dtem.adapters import card, storage
from dtem.models import hub

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
SHIPPED = Path(card.__file__).parent / "shipped"
REPORT = {
    "task": "classification",
    "data": "val",
    "images": 50,
    "rows": [
        {"method": "unmerged", "r": "0", "top1": 80.0, "cross_entropy": 1.0, "against_unmerged": None},
        {"method": "tome", "r": "8", "top1": 70.0, "cross_entropy": 1.5, "against_unmerged": None},
        {
            "method": "dtem",
            "r": "8",
            "top1": 75.0,
            "cross_entropy": 1.25,
            "against_unmerged": {
                "top1": {"value": -5.0, "low": -8.0, "high": -2.0},
                "loss": {"value": 0.25, "low": 0.125, "high": 0.5},
            },
        },
    ],
    "against_tome": [
        {
            "method": "dtem",
            "r": "8",
            "top1": {"value": 5.0, "low": 1.0, "high": 9.0},
            "loss": {"value": -0.25, "low": -0.5, "high": 0.0},
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trained(8).save_pretrained(tmp_path / "mine", trained_r=16)
    return tmp_path / "mine"


def test_a_folder_comes_back_bit_for_bit(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FOLDER
    expected = run(trained(8).model)
    for source in (folder, folder / "adapter.safetensors"):
        handle = dtem.from_pretrained(source, tiny())
        assert torch.equal(run(handle.model), expected)
        assert str(handle.r) == "8"


def test_config_says_what_the_file_is(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    header, _ = storage.read(folder / "adapter.safetensors")
    assert (config["library_name"], config["base_model"]) == ("dtem", BASE_MODEL)
    assert {name: config[name] for name in ("format", "digest", "trained_r")} == {
        name: header[name] for name in ("format", "digest", "trained_r")
    }


def test_files_of_two_adapters_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    other = trained(8)
    with torch.no_grad():
        next(other.parameters()).zero_()
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", folder)
    with pytest.raises(dtem.DtemError, match=r"config\.json next to it belongs to another adapter"):
        dtem.from_pretrained(folder, tiny())


@pytest.mark.parametrize("content", ['{"model_type": "vit"}', "[", "[]"])
def test_the_config_of_something_else_stays(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(dtem.DtemError, match="belongs to something other than an adapter"):
        trained(4).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert str(dtem.from_pretrained(folder, tiny()).r) == "8"  # it is no concern of the adapter


def test_a_card_has_the_keys_of_the_hub_and_intervals(tmp_path: Path) -> None:
    about = {"license": "mit", "datasets": ["imagenet-1k"], "base_model": "me/vit", "name": "me/adapter"}
    trained(8).save_pretrained(tmp_path / "a", trained_r=8, metrics=REPORT, **about)
    data = ModelCard.load(tmp_path / "a" / "README.md").data
    assert (data.library_name, data.license, data.base_model) == ("dtem", "mit", "me/vit")
    assert (data.base_model_relation, data.datasets, data.model_name) == ("adapter", ["imagenet-1k"], "me/adapter")
    accuracy, loss = data.eval_results
    assert (accuracy.metric_type, accuracy.metric_value, accuracy.dataset_type) == ("accuracy", 75.0, "imagenet-1k")
    assert accuracy.metric_args == {
        "r": "8",
        "images": 50,
        "unmerged": 80.0,
        "tome": 70.0,
        "difference_from_unmerged": {"value": -5.0, "low": -8.0, "high": -2.0},
        "difference_from_tome": {"value": 5.0, "low": 1.0, "high": 9.0},
    }
    assert loss.metric_args["difference_from_tome"] == {"value": -0.25, "low": -0.5, "high": 0.0}
    text = (tmp_path / "a" / "README.md").read_text()
    assert "| top-1 accuracy (%), r = 8 | 75.0 | -5.00 (-8.00 … -2.00) from unmerged, +5.00 (+1.00 … +9.00)" in text


def test_the_text_of_a_card_stays_and_its_metadata_do_not(folder: Path) -> None:
    path = folder / "README.md"
    text = path.read_text()
    path.write_text(text + "\nMy own words.\n")
    trained(8).save_pretrained(folder, license="mit")
    assert "My own words." in path.read_text()
    assert ModelCard.load(path).data.license == "mit"
    path.write_text("---\n: [\n---\n")
    with pytest.raises(dtem.DtemError, match=r"README\.md cannot be read as a model card"):
        trained(8).save_pretrained(folder)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({**REPORT, "rows": REPORT["rows"][:2]}, "rows of unmerged, tome, and none of dtem"),
        ({"task": "classification", "rows": [{"method": "dtem"}], "data": "", "images": 1}, "not an evaluation"),
        ("nowhere.json", "nowhere.json"),
    ],
)
def test_metrics_that_are_none(metrics: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(dtem.DtemError, match=says):
        trained(8).save_pretrained(tmp_path / "a", metrics=metrics)
    assert not (tmp_path / "a").exists()


def test_a_single_file_has_no_card(tmp_path: Path) -> None:
    with pytest.raises(dtem.DtemError, match="license is for the card of a folder"):
        trained(8).save_pretrained(tmp_path / "a.safetensors", license="mit")


def test_an_evaluation_becomes_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a report as `dtem.evaluate` returns it, and with its record."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    for label in range(5):
        Path("val", str(label)).mkdir(parents=True)
        Image.effect_noise((40, 40), 50 + 20 * label).convert("RGB").save(f"val/{label}/a.png")
    handle = trained(8)
    report = dtem.evaluate(handle, "val", r=8, methods="tome", out="results", progress=False)
    for number, metrics in enumerate((report, "results/record.json")):
        handle.save_pretrained(f"adapter{number}", metrics=metrics)
        accuracy, _ = ModelCard.load(f"adapter{number}/README.md").data.eval_results
        assert accuracy.metric_value == report.rows[-1].top1
        assert accuracy.metric_args["difference_from_tome"]["value"] == report.against_tome["dtem", "8"].top1.value
        assert (accuracy.dataset_name, accuracy.metric_args["images"]) == ("val", 5)


def test_from_a_cache_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Hub's own client, offline, from a cache of two commits as it lays them out."""
    cache = tmp_path / "cache" / "models--me--adapter"
    (cache / "refs").mkdir(parents=True)
    expected = {}
    for revision, r in (("main", 8), ("v1", 4)):
        commit = COMMITS[revision]
        (cache / "refs" / revision).write_text(commit)
        trained(r).save_pretrained(cache / "snapshots" / commit)
        expected[revision] = str(r)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_reachable", lambda _url: False)
    monkeypatch.setattr(hub, "loaded", {})
    assert str(dtem.from_pretrained("me/adapter", tiny()).r) == expected["main"]
    assert str(dtem.from_pretrained("me/adapter", tiny(), revision="v1").r) == expected["v1"]
    assert str(dtem.from_pretrained("me/adapter@v1", tiny()).r) == expected["v1"]
    assert hub.loaded == {"me/adapter": COMMITS["v1"]}
    with pytest.raises(dtem.DtemError, match="the Hub did not serve 'me/other'"):
        dtem.from_pretrained("me/other", tiny())
    with pytest.raises(dtem.DtemError, match="revision = 'v1' is for an adapter on the Hub"):
        dtem.from_pretrained(folder, tiny(), revision="v1")


def test_overview_has_the_numbers_of_the_cards() -> None:
    overview = dtem.adapter_overview()
    assert [adapter.name for adapter in overview.adapters] == dtem.list_adapters()
    by_name = {adapter.name: adapter for adapter in overview.adapters}
    deit = by_name["deit_tiny_patch16_224"]
    assert [row.r for row in deit.accuracy] == ["8", "13", "16"]
    assert deit.base_model == "timm/deit_tiny_patch16_224.fb_in1k"
    text = (SHIPPED / "deit_tiny_patch16_224.md").read_text()
    for row in deit.accuracy:
        value, low, high = row.against_tome
        assert f"| {row.r} | embeddings + norms | {row.top1:.1f} | {value:+.1f} ({low:+.1f} … {high:+.1f}) |" in text
    assert by_name["digits_vit"].accuracy
    assert "+2.9 (+1.1 … +4.7)" in str(overview)
