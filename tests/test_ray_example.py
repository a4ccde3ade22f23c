"""What an actor of examples/ray_predict.py does with a batch; Ray itself is not started."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_predict.py"
MODEL = "test_vit"  # timm's tiny one


def test_an_actor_predicts_and_lists_bad_files(tmp_path) -> None:
    spec = importlib.util.spec_from_file_location("ray_predict", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = timm.create_model(MODEL).eval()
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    noise = torch.randint(0, 256, (180, 180, 3), dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    actor = example.Predictor(MODEL, "7", str(tmp_path / "w.safetensors"), None, gpu=False)
    batch = {"path": np.array(["a.png", "b.png"]), "bytes": [b"no image", file.getvalue()]}
    found = actor(batch)
    dtem.patch(model, r=7)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    with torch.no_grad():
        expected = model(transform(Image.fromarray(noise))[None]).softmax(dim=1)[0]
    assert found["path"].tolist() == ["a.png", "b.png"]
    assert found["class"].tolist() == [-1, int(expected.argmax())]
    assert found["probability"][1] == pytest.approx(float(expected.max()), abs=1e-5)
    assert "cannot identify" in found["error"][0]
    assert found["error"][1] == ""
