"""Every verb on a folder of transformers: a classifier, and an encoder without a head."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dtem
from contract.hosts import hf as tiny
from contract.hosts import lively
from data.photo_folders import class_folders
from dtem.cli import app, main
from dtem.cli.parser import VerbParser
from dtem.data.images import open_image
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError

transformers = pytest.importorskip("transformers")
NAMES = {0: "owl", 1: "bee"}
SQUARE = {"height": 32, "width": 32}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, and two models with their image processors."""
    folder = tmp_path_factory.mktemp("transformers")
    class_folders(folder / "photos", 8)
    torch.manual_seed(0)
    classifier = lively(tiny("ViTForImageClassification", num_labels=2, id2label=NAMES, num_hidden_layers=2)())
    headless = lively(tiny("Dinov2Model", mlp_ratio=2, num_hidden_layers=2, image_size=56)())
    processor = transformers.ViTImageProcessor(size=SQUARE)
    for name, model in (("vit", classifier), ("dino", headless)):
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in the workspace that must succeed; returns its JSON."""
    monkeypatch.chdir(workspace)

    def command(*argv: str) -> dict:
        code = main([*argv, "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return command


def test_eval_counts_the_processors_pixels(run) -> None:
    report = run("eval", "--model", "hf:vit", "--data", "photos", "--r", "8", "--batch-size", "4")
    model = transformers.ViTForImageClassification.from_pretrained("vit").eval()
    processor = transformers.AutoImageProcessor.from_pretrained("vit")
    files = sorted(Path("photos").rglob("*.png"))
    with torch.no_grad():
        logits = model(**processor(images=[Image.open(file) for file in files], return_tensors="pt")).logits
    labels = torch.tensor([int(file.parent.name) for file in files])
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    unmerged, merged = report["rows"]
    assert math.isclose(unmerged["cross_entropy"], expected, rel_tol=1e-3)
    assert merged["macs"] < unmerged["macs"]


@pytest.mark.parametrize("model", ["hf:vit", "./vit"])
def test_predict_names_the_models_own_classes(run, model: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run("predict", "photos", "--model", model, "--r", "8", "--out", "p.parquet")
    rows = parquet.read_table("p.parquet").to_pylist()
    assert len(rows) == 8
    assert {row["class_name"] for row in rows} <= set(NAMES.values())


@pytest.mark.parametrize("model", ["vit", "dino"])
def test_training_writes_an_adapter_that_fits(run, model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "run"
    report = run("train", "--model", f"hf:{model}", "--data", "photos", "--batch-size", "4", "--loss", "distill",
                 "--epochs", "1", "--r", "4", "--workers", "0", "--out", str(out))  # fmt: skip
    assert report["updates"] == 2
    handle = dtem.from_pretrained(out / "adapter.safetensors", dtem.create_model(f"hf:{model}"))
    assert not handle.merger.is_untrained or report["loss"] == 0
    assert "hf:" in (out / "config.yaml").read_text()


def test_features_are_evaluated_by_their_neighbours(run) -> None:
    for model in ("hf:dino", "hf:vit"):  # a classifier gives features too: without its head
        report = run("eval", "--model", model, "--data", "photos", "--knn", "photos",
                     "--num-neighbours", "1", "--r", "8", "--batch-size", "4")  # fmt: skip
        assert report["rows"][0]["top1"] == 100, "an image is its own nearest neighbour"


def test_show_draws_groups_and_names(run) -> None:
    for model in ("hf:vit", "hf:dino"):
        report = run("show", "photos/0/000.png", "--model", model, "--method", "tome", "--r", "8", "--out", "a.png")
        assert report["model"] == model
    assert open_image("a.png").size[0] > 32


def test_flops_and_bench(run) -> None:
    report = run("flops", "--model", "hf:dino", "--r", "0,8")
    assert report["tokens"] == 65, "the processor's 32×32, not the 56×56 of the configuration"
    timed = run("bench", "--model", "hf:vit", "--r", "8", "--batch-size", "1", "--rounds", "2", "--warmup", "0")
    assert timed["rows"]


def test_compare_at_equal_cost(run) -> None:
    half = run("flops", "--model", "hf:vit", "--r", "0")["rows"][0]["macs"] * 0.8 / 1e9
    report = run("compare", "--model", "hf:vit", "--data", "photos", "--gflops", f"{half:.6f}", "--method", "tome",
                 "--batch-size", "4", "--timed-batch-size", "none")  # fmt: skip
    assert report["rows"]


def test_the_explorer_takes_a_classifier_and_refuses_features(workspace: Path, monkeypatch) -> None:
    monkeypatch.chdir(workspace)
    parser = VerbParser(prog="app")
    app.add_arguments(parser)
    own, _ = app._models(parser.parse_args(["--model", "hf:vit"]))
    from dtem.app.explorer import Explorer

    result = Explorer([own]).explore(np.zeros((32, 32, 3), np.uint8), "hf:vit", ["tome"], 4)
    assert result.visualisation.labels == list(NAMES.values())
    with pytest.raises(DtemError, match="no classifier"):
        app._models(parser.parse_args(["--model", "hf:dino"]))


def test_predict_refuses_features(workspace: Path, monkeypatch) -> None:
    monkeypatch.chdir(workspace)
    with pytest.raises(DtemError, match="no classifier"):
        dtem.predict(dtem.create_model("hf:dino"), "photos", "p.parquet")


def test_eval_refuses_features_without_neighbours(workspace: Path, monkeypatch) -> None:
    monkeypatch.chdir(workspace)
    with pytest.raises(DtemError, match=r"no classifier.*give knn"):
        dtem.evaluate("hf:dino", "photos", r=8)


@pytest.mark.parametrize("model", ["hf:vit", pytest.param("hf:dino", marks=pytest.mark.slow)])
def test_export_and_its_check_on_photos(workspace: Path, tmp_path: Path, model: str) -> None:
    """In a process of its own: torch.export does not get through the checks of shapes that tests add."""
    command = ["export", "--model", model, "--r", "8", "--data", "photos", "--out", str(tmp_path / "a.pt2"), "--json"]
    command = [sys.executable, "-m", "dtem.cli", *command]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["agreement"]["images"] == 8
    assert report["agreement"]["largest"] < 1e-4
    assert json.loads(report["metadata"]["mean"]) == [0.5] * 3


@pytest.mark.parametrize("model", ["hf:vit", "hf:dino"])
def test_tune_on_photos(run, model: str, monkeypatch) -> None:
    from dtem.tuning import probes
    from tuning.test_tune import made_up, made_up_timings

    monkeypatch.setenv("DTEM_CACHE", "costs")
    monkeypatch.setattr(probes, "measure", made_up)
    monkeypatch.setattr(probes, "time_plans", made_up_timings)
    report = run("tune", "--model", model, "--data", "photos", "--target", "1.2x", "--save", "tuned.safetensors")
    assert report["images"] == 8
    handle = dtem.from_pretrained("tuned.safetensors", dtem.create_model(model), r="tuned")
    assert list(handle.plan) == list(report["rows"][-1]["plan"])


def test_a_folder_without_a_processor_says_what_is_missing(tmp_path: Path) -> None:
    tiny("ViTForImageClassification")().save_pretrained(tmp_path / "bare")
    model = dtem.create_model(str(tmp_path / "bare"))
    with pytest.raises(DtemError, match=r"processor\.save_pretrained"):
        resolve_data_config(model)


def test_a_new_head_and_another_size(workspace: Path) -> None:
    model = dtem.create_model(f"hf:{workspace}/vit", num_classes=7)
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 7)
    model = dtem.create_model(f"hf:{workspace}/dino", img_size=(24, 40))
    assert dtem.patch(model, r=2).host.image == (3, 24, 40)
    with pytest.raises(DtemError, match="multiple of the patch size"):
        dtem.create_model(f"hf:{workspace}/dino", img_size=30)


PROCESSORS = [
    ("ViTImageProcessor", {"size": SQUARE}),
    ("DeiTImageProcessor", {"size": {"height": 40, "width": 40}, "crop_size": SQUARE}),
    ("CLIPImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": SQUARE}),
    ("SiglipImageProcessor", {"size": SQUARE}),
    ("ViTImageProcessor", {"size": SQUARE, "do_normalize": False}),
    ("ViTImageProcessor", {"size": SQUARE, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1] * 3}),
]


@pytest.mark.parametrize(("name", "settings"), PROCESSORS)
def test_pixels_are_those_of_the_processor(name: str, settings: dict) -> None:
    from dtem.models.hf_processor import as_timm_config

    processor = getattr(transformers, name)(**settings)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    image = image.resize((70, 50), Image.Resampling.BICUBIC)
    config = {**as_timm_config(processor, (32, 32)), "input_size": (3, 32, 32)}
    expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
    got = eval_transform(config)(image)
    assert got.shape == expected.shape
    step = 1 / 255 / min(config["std"])  # Pillow and torchvision round the resized bytes
    assert (got - expected).abs().max() < 2.1 * step


def test_a_processor_that_keeps_shapes_is_refused() -> None:
    from dtem.models.hf_processor import as_timm_config

    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 36}, do_center_crop=False)
    with pytest.raises(DtemError, match="one shape"):
        as_timm_config(processor, (32, 32))
