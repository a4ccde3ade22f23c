"""`dtem predict --engine`: the same predictions as PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem
from dtem.errors import DtemError

ROOT = Path(__file__).parents[2]
parquet = pytest.importorskip("pyarrow.parquet", reason='needs pip install ".[predict]"')


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven images in two folders, one cut off, and weights that do not give every class the same."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), "w.safetensors")
    for number in range(7):
        place = Path("photos", str(number % 2))
        place.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((170, 180), 30 + 20 * number).convert("RGB").save(place / f"{number}.png")
    content = Path("photos/1/3.png").read_bytes()
    Path("photos/1/3.png").write_bytes(content[: len(content) // 2])
    return tmp_path


def predict(*more: str) -> None:
    """The command in a process of its own, where no import hook checks shapes: torch.export cannot trace that."""
    command = [
        sys.executable,
        "-m",
        "dtem.cli",
        "predict",
        "photos",
        "--model",
        "test_vit",
        "--weights",
        "w.safetensors",
    ]
    command += ["--num-classes", "5", "--r", "7", "--batch-size", "2", "--top", "3", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def rows(path: Path) -> dict[str, dict]:
    return {row["name"]: row for row in parquet.read_table(path).to_pylist()}


def assert_same(found: dict[str, dict], expected: dict[str, dict]) -> None:
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        assert found[name].keys() == row.keys()
        if row["error"] is not None:
            assert found[name]["error"] is not None
            assert found[name]["class"] is None
            continue
        assert found[name]["class"] == row["class"]
        assert found[name]["probabilities"] == pytest.approx(row["probabilities"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_an_engine_predicts_what_pytorch_does(engine: str, photos: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(engine, engine))
    predict("--out", "eager.parquet")
    predict("--out", "engine.parquet", "--engine", engine)
    assert_same(rows(photos / "engine.parquet"), rows(photos / "eager.parquet"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": "tensorrt"}, "engine = 'tensorrt' is not known; choose one of: eager, onnx, openvino"),
        ({"engine": "onnx", "dtype": "float16"}, "engine onnx has no float16"),
    ],
)
def test_what_does_not_go_together(options: dict, says: str, photos: Path) -> None:
    model = timm.create_model("test_vit", num_classes=5).eval()
    dtem.patch(model, "tome", r=2)
    settings = {"data": "photos", "out": "p.parquet", **options}
    with pytest.raises(DtemError, match=says):
        dtem.predict(model, settings.pop("data"), settings.pop("out"), **settings)
