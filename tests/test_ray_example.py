"""examples/ray_predict.py: what an actor does with a batch, and the whole script on a Ray of its own (slow)."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import dtem

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_predict.py"
MODEL = "test_vit"  # timm's tiny one


@pytest.fixture
def weights(tmp_path) -> Path:
    """Of a model that does not give every class the same."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL).eval()
    torch.nn.init.normal_(model.head.weight)
    path = tmp_path / "w.safetensors"
    save_file(model.state_dict(), path)
    return path


def image() -> Image.Image:
    return Image.fromarray(torch.randint(0, 256, (180, 180, 3), dtype=torch.uint8).numpy())


def expected(weights: Path, picture: Image.Image) -> torch.Tensor:
    """Probabilities, (k)."""
    model = timm.create_model(MODEL).eval()
    model.load_state_dict(load_file(weights))
    dtem.patch(model, r=7)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    with torch.no_grad():
        return model(transform(picture)[None]).softmax(dim=1)[0]


def test_an_actor_predicts_and_lists_bad_files(weights) -> None:
    spec = importlib.util.spec_from_file_location("ray_predict", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    picture, file = image(), io.BytesIO()
    picture.save(file, "png")
    actor = example.Predictor(MODEL, "7", str(weights), None, gpu=False)
    predicted = actor({"path": np.array(["a.png", "b.png"]), "bytes": [b"no image", file.getvalue()]})
    wanted = expected(weights, picture)
    assert predicted["path"].tolist() == ["a.png", "b.png"]
    assert predicted["class"].tolist() == [-1, int(wanted.argmax())]
    assert predicted["probability"][1] == pytest.approx(float(wanted.max()), abs=1e-5)
    assert "cannot identify" in predicted["error"][0]
    assert predicted["error"][1] == ""


@pytest.mark.slow
def test_the_script_on_a_local_ray(weights, tmp_path) -> None:
    pytest.importorskip("ray", reason='ray is not installed: pip install ".[ray]"')
    import pyarrow.parquet

    photos = tmp_path / "photos"
    photos.mkdir()
    pictures = {f"{number}.png": image() for number in range(5)}
    for name, picture in pictures.items():
        picture.save(photos / name)
    (photos / "bad.png").write_bytes(b"no image")
    options = [
        "--model",
        MODEL,
        "--weights",
        str(weights),
        "--r",
        "7",
        "--batch-size",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    subprocess.run([sys.executable, str(EXAMPLE), str(photos), *options], check=True, timeout=500)
    rows = {Path(row["path"]).name: row for row in pyarrow.parquet.read_table(tmp_path / "out").to_pylist()}
    assert set(rows) == {*pictures, "bad.png"}
    assert rows["bad.png"]["class"] == -1
    assert rows["bad.png"]["error"]
    for name, picture in pictures.items():
        wanted = expected(weights, picture)
        assert rows[name]["class"] == int(wanted.argmax())
        assert rows[name]["probability"] == pytest.approx(float(wanted.max()), abs=1e-5)
        assert rows[name]["error"] == ""
