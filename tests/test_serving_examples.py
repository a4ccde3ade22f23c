"""examples/serve_onnx.py and serve_ray.py answer with what the model predicts, and collect requests (slow)."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A file, and its model. It is written in a process of its own, where no import hook checks shapes."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5).eval()
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), folder / "w.safetensors")
    command = [sys.executable, "-m", "dtem.cli", "export", "--model", "test_vit", "--weights", "w.safetensors"]
    command += ["--num-classes", "5", "--r", "7", "--out", "model.onnx"]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True, timeout=200)
    dtem.patch(model, r=7)
    return folder / "model.onnx", model


def pictures(folder: Path) -> list[bytes]:
    contents = []
    for number in range(8):
        path = folder / f"{number}.png"
        Image.effect_noise((200, 180 + number), 30 + 20 * number).convert("RGB").save(path)
        contents.append(path.read_bytes())
    return contents


def ask(url: str, content: bytes | None = None) -> object:
    with urllib.request.urlopen(url, content, timeout=60) as reply:
        return json.load(reply)


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """The address of a server that runs for the time of the block."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(line.strip() for line in server.stdout if line.startswith("http"))
        finally:
            server.terminate()


def check(url: str, contents: list[bytes], model: torch.nn.Module, folder: Path) -> None:
    transform = eval_transform(resolve_data_config(model))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda content: ask(url, content), contents))
    for number, answer in enumerate(answers):
        with torch.no_grad():
            image = Image.open(folder / f"{number}.png").convert("RGB")
            expected = model(transform(image)[None]).softmax(dim=1)[0]
        assert answer[0]["class"] == int(expected.argmax())
        assert answer[0]["probability"] == pytest.approx(float(expected.max()), abs=0.01)


def test_onnxruntime_alone(exported: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = exported
    contents = pictures(tmp_path)
    with serving(str(ROOT / "examples" / "serve_onnx.py"), str(path), "--port", "0", "--wait", "0.5") as url:
        check(url, contents, model, tmp_path)
        served = ask(url)
        assert served["pictures"] == 8
        assert served["batches"] < 8
        for wrong, status in ((b"no picture", 400), (b"", 413)):
            with pytest.raises(urllib.error.HTTPError, match=str(status)):
                ask(url, wrong)


def test_ray_serve(exported: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install ".[serve]"')
    path, model = exported
    contents = pictures(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with serving(str(ROOT / "examples" / "serve_ray.py"), str(path), "--port", port) as url:
        check(url, contents, model, tmp_path)
        assert "no picture" in ask(url, b"no picture")["error"]
