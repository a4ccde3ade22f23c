"""Verbs on a folder of a NaFlex model: images of any shape where the model reads them, square ones elsewhere."""

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
from contract.hosts import lively
from dtem.cli import main
from dtem.models import naflex

transformers = pytest.importorskip("transformers")
NAMES = {0: "owl", 1: "bee"}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of four shapes, and a model with its image processor."""
    folder = tmp_path_factory.mktemp("naflex")
    random = np.random.default_rng(0)
    for index, shape in enumerate([(40, 60), (70, 30), (33, 33), (20, 90)] * 2):
        place = folder / "photos" / str(index % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (*shape, 3), np.uint8)).save(place / f"{index}.png")
    vision = {**SIZES, "num_patches": 64}
    torch.manual_seed(0)
    config = transformers.Siglip2Config(vision_config=vision, num_labels=2, id2label=NAMES)
    lively(transformers.Siglip2ForImageClassification(config)).save_pretrained(folder / "model")
    transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=64).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in the workspace that must succeed; returns its JSON."""
    monkeypatch.chdir(workspace)

    def command(*argv: str) -> dict:
        code = main([*argv, "--model", "model", "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return command


def by_processor(r: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Logits on what the image processor makes of the photos, their labels and names."""
    model = transformers.Siglip2ForImageClassification.from_pretrained("model").eval()
    processor = transformers.AutoImageProcessor.from_pretrained("model")
    files = sorted(Path("photos").rglob("*.png"))
    inputs = processor(images=[Image.open(file) for file in files], return_tensors="pt")
    assert len(inputs["spatial_shapes"].unique(dim=0)) == 4
    if r:
        dtem.patch(model, "tome", r=r)
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits, torch.tensor([int(file.parent.name) for file in files]), [file.name for file in files]


def test_images_are_evaluated_in_their_own_shapes(run) -> None:
    report = run("eval", "--data", "photos", "--r", "9", "--method", "tome", "--batch-size", "8")
    for row, r in zip(report["rows"], (0, 9), strict=True):
        logits, labels, _ = by_processor(r)
        expected = torch.nn.functional.cross_entropy(logits, labels).item()
        assert math.isclose(row["cross_entropy"], expected, rel_tol=1e-4)


def test_images_are_predicted_in_their_own_shapes(run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run("predict", "photos", "--method", "tome", "--r", "9", "--out", "p.parquet")
    logits, _, names = by_processor(9)
    rows = {Path(row["name"]).name: row for row in parquet.read_table("p.parquet").to_pylist()}
    for name, expected in zip(names, logits.argmax(dim=1).tolist(), strict=True):
        assert rows[name]["class_name"] == NAMES[expected]


def test_its_features_are_evaluated_by_their_neighbours(run) -> None:
    report = run("eval", "--data", "photos", "--knn", "photos", "--num-neighbours", "1", "--r", "9")
    assert report["rows"][0]["top1"] == 100, "an image is its own nearest neighbour"


def test_verbs_of_one_shape_make_images_square(run, tmp_path: Path) -> None:
    assert run("flops", "--r", "9")["tokens"] == 64
    assert run("bench", "--r", "9", "--batch-size", "1", "--rounds", "2", "--warmup", "0")["rows"]
    assert run("show", "photos/0/0.png", "--method", "tome", "--r", "9", "--out", "a.png")["rows"]
    trained = run("train", "--data", "photos", "--batch-size", "4", "--loss", "distill", "--epochs", "1", "--r", "9",
                  "--workers", "0", "--out", str(tmp_path / "run"))  # fmt: skip
    assert trained["updates"] == 2


@pytest.mark.slow
def test_a_file_takes_square_images(workspace: Path, tmp_path: Path) -> None:
    """In a process of its own: torch.export does not get through the checks of shapes that tests add."""
    command = ["export", "--model", "model", "--r", "9", "--data", "photos", "--out", str(tmp_path / "a.pt2"), "--json"]
    command = [sys.executable, "-m", "dtem.cli", *command]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)
    assert exported["agreement"]["largest"] < 1e-4
    assert json.loads(exported["metadata"]["image"]) == [3, 32, 32]


def test_a_processor_of_more_patches_than_positions(workspace: Path, tmp_path: Path) -> None:
    """Positions are interpolated, and costs are those of as many patches."""
    model = dtem.create_model(str(workspace / "model"))
    model.save_pretrained(tmp_path)
    transformers.Siglip2ImageProcessor(patch_size=4, max_num_patches=100).save_pretrained(tmp_path)
    assert dtem.patch(dtem.create_model(str(tmp_path)), r=2).host.patches == 100
    square = dtem.create_model(str(workspace / "model"), img_size=24)
    assert dtem.patch(square, r=2).host.patches == 36
    assert not hasattr(square, "naflex_processor")


def test_what_is_packed_is_unpacked() -> None:
    grids = torch.tensor([[2, 3], [1, 4]])
    patches = torch.randn(2, 7, 12)
    inputs = naflex.unpack(naflex.pack(patches, grids))
    assert torch.equal(inputs["pixel_values"], patches)
    assert torch.equal(inputs["spatial_shapes"], grids)
    assert inputs["pixel_attention_mask"].sum(dim=1).tolist() == [6, 4]
