"""The mean of adapters: what it holds, what it says of itself, and what has no mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import dtem
from dtem.adapters import storage
from dtem.adapters.averaging import average_adapters
from dtem.adapters.header import digest
from dtem.cli import main

SHAPE = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 5}


def tiny(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SHAPE, **options}).eval()


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, shift: float, notes: dict[str, str] | None = None, r: object = 8, **options: Any) -> Path:
        host = {key: options.pop(key) for key in SHAPE.keys() & options.keys()}
        handle = dtem.patch(tiny(**host), r=r, **options)
        with torch.no_grad():
            for parameter in handle.method.parameters():
                parameter += shift
        path = tmp_path / name
        dtem.save_pretrained(handle, path, trained_r=r, notes=notes)
        return path

    return make


def test_mean_of_all(adapter: Callable[..., Path], tmp_path: Path) -> None:
    sources = [adapter(f"{shift}.safetensors", shift) for shift in (0.0, 0.3, 0.9)]
    average_adapters(sources, tmp_path / "mean.safetensors")
    start, mean = load_file(sources[0]), load_file(tmp_path / "mean.safetensors")
    assert start.keys() == mean.keys()
    for name, part in start.items():
        torch.testing.assert_close(mean[name], part + 0.4)
    handle = dtem.from_pretrained(tmp_path / "mean.safetensors", tiny())
    assert handle.plan[0] == 8
    handle.model(torch.randn(2, 3, 32, 32))


def test_says_what_it_is(adapter: Callable[..., Path], tmp_path: Path) -> None:
    first = adapter("a.safetensors", 0.1, {"lr": "3e-3", "trained_on": json.dumps(["b.jpg", "a.jpg"])}, temperature=0.3)
    second = adapter("b.safetensors", 0.2, {"lr": "1e-3", "trained_on": json.dumps(["c.jpg", "a.jpg"])}, r=4)
    out = tmp_path / "mean.safetensors"
    written = average_adapters([first, second], out)
    header, _ = storage.read(out)
    assert (header["options"]["temperature"], header["schedule"], header["trained_r"]) == (0.3, "8", None)
    assert json.loads(header["notes"]["trained_on"]) == ["a.jpg", "b.jpg", "c.jpg"]
    assert json.loads(header["notes"]["mean_of"]) == [{"lr": "3e-3"}, {"lr": "1e-3"}]
    assert written["notes"] == header["notes"]
    assert written["digest"] == header["digest"] == digest(load_file(out))


def test_a_note_that_is_no_list_of_files(adapter: Callable[..., Path], tmp_path: Path) -> None:
    damaged = adapter("a.safetensors", 0.1, {"trained_on": "{"})
    with pytest.raises(dtem.DtemError, match="trained_on is not a JSON list"):
        average_adapters([damaged, adapter("b.safetensors", 0.2)], tmp_path / "mean.safetensors")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 8}, "other names or shapes"),
        ({"depth": 2}, "its host is"),
        ({"method": "patch_merger"}, "its method is patch_merger"),
        ({"init": "random", "dim": 16}, "started at random"),
        ({"seed": 1}, "its option seed is 1"),
    ],
)
def test_what_has_no_mean(adapter: Callable[..., Path], tmp_path: Path, options: dict[str, Any], words: str) -> None:
    first, other = adapter("a.safetensors", 0.1), adapter("b.safetensors", 0.2, **options)
    with pytest.raises(dtem.DtemError, match=words) as caught:
        average_adapters([first, other], tmp_path / "mean.safetensors")
    assert str(other) in str(caught.value)
    assert not (tmp_path / "mean.safetensors").exists()


def test_damaged_file_leaves_the_old_one(adapter: Callable[..., Path], tmp_path: Path) -> None:
    first, other = adapter("a.safetensors", 0.1), adapter("b.safetensors", 0.2)
    out = tmp_path / "mean.safetensors"
    average_adapters([first, other], out)
    before = out.read_bytes()
    other.write_bytes(other.read_bytes()[:-10])
    with pytest.raises(dtem.DtemError, match=r"b\.safetensors: this is not a complete safetensors file"):
        average_adapters([first, other], out)
    assert out.read_bytes() == before


def test_command(adapter: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(adapter(f"{n}.safetensors", n / 10, {"trained_on": f'["{n}.jpg"]'})) for n in range(2)]
    out = str(tmp_path / "mean.safetensors")
    assert main(["average", *files, "--out", out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "out": out,
        "adapters": files,
        "method": "dtem",
        "host": "vit_tiny_patch16_224",
        "training_files": 2,
    }
    assert main(["average", *files, "--out", out]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # a long path folds the line
    assert "the mean of 2 dtem adapters for vit_tiny_patch16_224; 2 training files" in printed
    assert main(["average", files[0], "--out", out]) == 2
    assert "two adapters or more, not 1" in capsys.readouterr().err
    assert main(["average", *files, "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    assert main(["average", files[0], str(tmp_path / "none.safetensors"), "--out", out]) == 2
    assert "no adapter found as" in capsys.readouterr().err
