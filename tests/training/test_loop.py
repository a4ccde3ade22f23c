"""Runs on a tiny model: what learns, that a killed run ends as an uninterrupted one, and what goes wrong early."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import dtem
from dtem.cli import main
from dtem.tasks.classification import evaluate
from dtem.training.config import TrainConfig, build
from dtem.training.logs import Log
from dtem.training.loop import train
from dtem.types import DtemError

CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "interpolation": "bicubic",
    "crop_pct": 1.0,
}
PLAIN = {"mixup": 0.0, "cutmix": 0.0, "auto": "", "erasing": 0.0, "workers": 0}
CLASSES = 3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pictures in 3 classes."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for label in range(CLASSES):
        folder = root / str(label)
        folder.mkdir()
        for index in range(8):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8) // 2 + 40 * label
            Image.fromarray(pixels).save(folder / f"{label}_{index}.png")
    return root


def model(drop_path: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        depth=3,
        embed_dim=32,
        num_heads=2,
        num_classes=CLASSES,
        drop_path_rate=drop_path,
    )


def settings(images: Path, out: Path, **changes: Any) -> TrainConfig:
    base = {
        "data": str(images),
        "out": str(out),
        "batch": 8,
        "updates": 4,
        "r": "4",
        "host_r": "3",
        "lr": 1e-2,
        "host_lr": 1e-3,
    }
    return build({**PLAIN, **base, **changes})


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: part.clone() for name, part in module.state_dict().items()}


def test_modular_changes_embeddings_alone(images: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    result = train(host, settings(images, tmp_path), CONFIG)
    after = state(host)
    untrained = state(dtem.patch(model()).model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = {name for name in after if name not in before and not torch.equal(after[name], untrained[name])}
    assert {name.split(".")[3] for name in moved} == {"0", "1"}  # the last block's has no gradient to wait for
    assert result.updates == 4
    assert not host.training
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model())
    assert loaded.plan[0] == 4
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded.model.eval()(x), host(x))


def test_end_to_end_takes_turns(images: Path, tmp_path: Path) -> None:
    """Of three updates the first trains the embeddings, the others the host."""
    seen = []
    for updates in (1, 2):
        host = model(0.1)
        before = state(host)
        train(host, settings(images, tmp_path / str(updates), mode="end-to-end", every=3, updates=updates), CONFIG)
        after = state(host)
        embeddings = load_file(tmp_path / str(updates) / "adapter.safetensors")
        seen.append((any(not torch.equal(before[name], after[name]) for name in before), embeddings))
    assert [changed for changed, _ in seen] == [False, True]
    for name, tensor in seen[0][1].items():
        torch.testing.assert_close(tensor, seen[1][1][name], rtol=0, atol=0)
    saved = load_file(tmp_path / "2" / "model.safetensors")
    fresh = model()
    fresh.load_state_dict(saved)


@pytest.mark.parametrize(("mode", "method"), [("finetune", "tome"), ("finetune", "evit"), ("end-to-end", "tome_soft")])
def test_baselines_learn_in_the_host(images: Path, tmp_path: Path, mode: str, method: str) -> None:
    host = model()
    before = state(host)
    train(host, settings(images, tmp_path, mode=mode, method=method, updates=2), CONFIG)
    after = state(host)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "model.safetensors").exists()


def test_self_distillation_needs_no_labels_and_lowers_the_loss(images: Path, tmp_path: Path) -> None:
    flat_folder = tmp_path / "photos"
    flat_folder.mkdir()
    for file in images.glob("*/*.png"):
        (flat_folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DtemError, match=r"no labels.*--loss distill"):
        train(model(), settings(flat_folder, tmp_path / "a"), CONFIG)
    host = model()
    with torch.no_grad():
        host.head.weight.mul_(20)  # a random head says nothing much
    train(
        host,
        settings(flat_folder, tmp_path / "b", loss="distill", updates=30, batch=24, flip=False, crop="none"),
        CONFIG,
    )
    losses = [json.loads(line)["loss"] for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_evaluation_on_the_way_and_the_best_of_it(images: Path, tmp_path: Path) -> None:
    config = settings(images, tmp_path, eval_data=str(images), eval_r="0,4", eval_every=2, updates=4, save_every=3)
    result = train(model(), config, CONFIG)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    scores = [line["eval/score"] for line in lines if "eval/score" in line]
    assert len(scores) == 2
    assert set(result.outcomes) == {"0", "4"}
    best = dtem.from_pretrained(tmp_path / "best.safetensors", model())
    from dtem.tasks.classification.data import Loader, eval_transform
    from dtem.tasks.classification.sources import open_source

    again = evaluate.sweep(best, Loader(open_source(str(images)), eval_transform(CONFIG), 8), ["0", "4"])
    assert sum(found.mean_loss for found in again.values()) / 2 == pytest.approx(min(scores), abs=1e-5)


@pytest.mark.parametrize("mode", ["modular", "end-to-end"])
def test_a_run_in_two_parts_is_the_whole_run(
    images: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"mode": mode, "every": 2, "updates": 5, "save_every": 2, "mixup": 0.8, "batch": 8, "r": "2,4"}
    whole = model(0.2)
    train(whole, settings(images, tmp_path / "whole", **changes), CONFIG)

    from dtem.training import loop

    step = loop.Run._step

    def stop(self: Any, *args: Any) -> Any:
        if self.update == 3:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(loop.Run, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(model(0.2), settings(images, tmp_path / "parts", **changes), CONFIG)
    monkeypatch.undo()
    parts = model(0.2)
    assert train(parts, settings(images, tmp_path / "parts", **changes), CONFIG).updates == 5
    for name, tensor in state(whole).items():
        assert torch.equal(tensor, state(parts)[name]), name


def test_accumulation_is_a_larger_batch(images: Path, tmp_path: Path) -> None:
    one, two = model(), model()
    train(one, settings(images, tmp_path / "1", updates=3, loss="both"), CONFIG)
    train(two, settings(images, tmp_path / "2", updates=3, loss="both", accumulate=2), CONFIG)
    for name, tensor in state(one).items():
        torch.testing.assert_close(tensor, state(two)[name], rtol=0, atol=3e-4)  # the updates moved them by 0.02


def test_checkpointing_and_bf16_train_too(images: Path, tmp_path: Path) -> None:
    one, two = model(), model()
    train(one, settings(images, tmp_path / "1"), CONFIG)
    train(two, settings(images, tmp_path / "2", checkpointing=True), CONFIG)
    for name, tensor in state(one).items():
        torch.testing.assert_close(tensor, state(two)[name], rtol=1e-4, atol=1e-5)
    script = (
        "import sys; sys.path.insert(0, sys.argv[3]); import test_loop as t; from pathlib import Path\n"
        "config = t.settings(Path(sys.argv[1]), Path(sys.argv[2]), dtype='bf16')\n"
        "print(t.train(t.model(), config, t.CONFIG).loss)"
    )  # accelerate fixes the precision once per process
    done = _python("-c", script, str(images), str(tmp_path / "3"), str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 9, "accumulate": 2}, "batch = 9 cannot be split"),
        ({"batch": 1000}, "holds 24 images"),
        ({"data": "nowhere"}, "nowhere"),
        ({"data": ""}, "no training images"),
        ({"method": "tome"}, "no soft mode"),
        ({"r": "0"}, "r = 0 merges nothing in the first 2 blocks"),
        ({"r": "4,0"}, "r = 0 merges nothing"),
        ({"r": "0/0/4"}, "r = 0/0/4 merges nothing"),
        ({"options": {"warmth": 1}}, "no option 'warmth'"),
        ({"mode": "finetune", "method": "tome", "host_lr": 1e20}, "the loss is .* lower the learning rate"),
    ],
)
def test_mistakes_are_named(images: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        train(model(), settings(images, tmp_path, **changes), CONFIG)


def test_a_run_goes_on_only_as_it_began(images: Path, tmp_path: Path) -> None:
    train(model(), settings(images, tmp_path, updates=1), CONFIG)
    with pytest.raises(DtemError, match=r"lr = 0.01, and you ask for 0.5"):
        train(model(), settings(images, tmp_path, updates=1, lr=0.5), CONFIG)
    assert train(model(), settings(images, tmp_path, updates=1, lr=0.5), CONFIG, restart=True).updates == 1
    other = model()
    with torch.no_grad():
        other.norm.weight[0] += 1e-3
    with pytest.raises(DtemError, match=r"began with other weights of vit_tiny_patch16_224"):
        train(other, settings(images, tmp_path, updates=1, lr=0.5), CONFIG)
    (tmp_path / "last.pt").write_bytes(b"nonsense")
    with pytest.raises(DtemError, match=r"last.pt is damaged"):
        train(model(), settings(images, tmp_path, updates=1), CONFIG)


def test_what_is_frozen_stays_frozen(images: Path, tmp_path: Path) -> None:
    host = model()
    host.patch_embed.requires_grad_(False)
    before = state(host)
    train(host, settings(images, tmp_path / "some", mode="finetune", method="tome"), CONFIG)
    moved = {name.partition(".")[0] for name, part in before.items() if not torch.equal(state(host)[name], part)}
    assert moved == {"cls_token", "pos_embed", "blocks", "norm", "head"}
    with pytest.raises(DtemError, match="all of it is frozen"):
        train(model().requires_grad_(False), settings(images, tmp_path / "all", mode="finetune", method="tome"), CONFIG)


def test_an_adapter_serves_the_largest_r_of_several(images: Path, tmp_path: Path) -> None:
    train(model(), settings(images, tmp_path, r="2,4,3"), CONFIG)
    assert dtem.storage.read(tmp_path / "adapter.safetensors")[0]["trained_r"] == "4"


def test_another_size_and_the_settings_that_a_run_leaves(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ["--model", "vit_tiny_patch16_224", "--random", "--img-size", "32", "--classes", "3"]
    plain = ["--mixup", "0", "--cutmix", "0", "--workers", "0", "--batch", "2", "--updates", "1", "--r", "1"]
    assert main(["train", *host, "--data", str(images), "--out", str(tmp_path / "a"), *plain]) == 0
    kept = tmp_path / "a" / "config.yaml"
    assert main(["train", "--random", "--config", str(kept), "--out", str(tmp_path / "b")]) == 0
    one, two = (load_file(tmp_path / name / "adapter.safetensors") for name in "ab")
    assert all(torch.equal(part, two[name]) for name, part in one.items())
    capsys.readouterr()
    for flags, message in ((["--norm", "half"], "--norm is for segmentation"), (["--beams", "2"], "is for captioning")):
        assert main(["train", *host, "--data", str(images), "--out", str(tmp_path / "c"), *plain, *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_full_log_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here to stand for a full disk")
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(DtemError, match="No space left"), Log(tmp_path, (), 1, 0, speaks=True) as log:
        log.step(1, {"loss": 1.0})


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model(), settings(images, tmp_path, updates=1), CONFIG)
    before = (tmp_path / "last.pt").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DtemError, match=r"cannot be written .No space left"):
        train(model(), settings(images, tmp_path / "new", updates=1), CONFIG)
    with pytest.raises(DtemError, match="cannot be written"):
        train(model(), settings(images, tmp_path, updates=1), CONFIG)
    assert (tmp_path / "last.pt").read_bytes() == before


def test_corrupt_images_are_counted_or_fatal(images: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(images, broken)
    (broken / "1" / "1_0.png").write_bytes(b"not a picture")
    result = train(model(), settings(broken, tmp_path / "a", updates=3), CONFIG)
    assert list(result.skipped) == ["1/1_0.png"]
    with pytest.raises(DtemError, match=r"1_0.png"):
        train(model(), settings(broken, tmp_path / "b", updates=3, bad="stop"), CONFIG)


def test_a_label_outside_the_head_is_found_before_the_first_step(images: Path, tmp_path: Path) -> None:
    host = model()
    host.reset_classifier(2)
    with pytest.raises(DtemError, match=r"label 2.*2 classes"):
        train(host, settings(images, tmp_path), CONFIG)


def _python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=280)


def _command(images: Path, out: Path, *more: str) -> list[str]:
    plain = ["--mixup", "0", "--cutmix", "0", "--auto", "", "--erasing", "0", "--workers", "0", "--save-every", "1"]
    host = ["--model", "test_vit", "--random", "--classes", "3", "--img-size", "64"]
    return ["-m", "dtem.cli", "train", *host, "--data", str(images), "--out", str(out), "--r", "3", *plain, *more]


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(images: Path, tmp_path: Path) -> None:
    size = ["--batch", "8", "--updates", "12", "--lr", "1e-2"]
    whole = _python(*_command(images, tmp_path / "whole", *size))
    assert whole.returncode == 0, whole.stderr
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *_command(images, tmp_path / "killed", *size)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "killed" / "log.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run never began"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "it was done before it was killed; make the run longer"
    resumed = _python(*_command(images, tmp_path / "killed", *size))
    assert resumed.returncode == 0, resumed.stderr
    expected, found = (load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "killed"))
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert [json.loads(line)["update"] for line in log.read_text().splitlines()] == list(range(1, 13))


def test_two_processes_train_as_one_with_twice_the_batch(images: Path, tmp_path: Path) -> None:
    size = ["--batch", "8", "--updates", "4", "--lr", "1e-3", "--eval-data", str(images), "--eval-r", "0,3"]
    one = _python(*_command(images, tmp_path / "one", *size))
    assert one.returncode == 0, one.stderr
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "29517",
    ]
    command = _command(images, tmp_path / "two", *size, "--json")[1:]
    two = _python(*launch, "-m", "--", *command)
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout)["updates"] == 4, "one of them speaks for both"
    expected, found = (load_file(tmp_path / name / "adapter.safetensors") for name in ("one", "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor, found[name], rtol=1e-3, atol=1e-5)
    scores = [
        [
            json.loads(line)["eval/score"]
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
            if "eval" in line
        ]
        for name in ("one", "two")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
