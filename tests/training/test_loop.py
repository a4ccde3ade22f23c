"""Runs on a tiny model: what learns, that a killed run ends as an uninterrupted one, and what goes wrong early."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
from benchmarks.reproduce import register_ablations
from dtem.adapters import storage
from dtem.cli import main
from dtem.errors import DtemError
from dtem.methods import METHODS
from dtem.tasks.classification import evaluator
from dtem.training import checkpoint_store
from dtem.training.config import TrainConfig
from dtem.training.logs import Log
from dtem.training.loop import open_accelerator
from dtem.training.train import TrainReport

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


@pytest.fixture
def ablations() -> Iterator[None]:
    """Methods that exist in studies alone, among them one whose soft step trains the host."""
    register_ablations()
    yield
    for name in ("tome_soft", "tome_gumbel"):
        METHODS._classes.pop(name)


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
        "batch_size": 8,
        "updates": 4,
        "r": "4",
        "host_r": "3",
        "lr": 1e-2,
        "host_lr": 1e-3,
    }
    return TrainConfig.from_dict({**PLAIN, **base, **changes})


def train(model: nn.Module, config: TrainConfig, restart: bool = False) -> TrainReport:
    return dtem.train(model, config.data, config=config, restart=restart)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, those of the method too where the model is patched."""
    parts = module.state_dict()
    if hasattr(module, "dtem"):
        parts |= {f"dtem.method.{name}": part for name, part in module.dtem.method.state_dict().items()}
    return {name: part.clone() for name, part in parts.items()}


def test_modular_changes_embeddings_alone(images: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    result = train(host, settings(images, tmp_path, learn=["embeddings"]))
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


def test_norms_and_embeddings_take_turns(images: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    result = train(host, settings(images, tmp_path, updates=8, norm_share=0.75, r="8", loss="distill"))
    assert all(torch.equal(part, before[name]) for name, part in host.state_dict().items())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [name for line in lines for name in line if name.startswith("r/")] == [
        *["r/embeddings", "r/norms", "r/norms", "r/norms"] * 2
    ]
    assert {line["r/embeddings"] for line in lines if "r/embeddings" in line} == {8}
    drawn = [line["r/norms"] for line in lines if "r/norms" in line]
    assert min(drawn) >= 4
    assert max(drawn) <= 8
    assert len(set(drawn)) > 1
    untrained = dtem.patch(model(), norms=True).method.state_dict()
    moved = {name for name, part in result.handle.method.state_dict().items() if not torch.equal(part, untrained[name])}
    assert {name.split(".")[0] for name in moved} == {"affine", "embeddings"}
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded.model.eval()(x), host(x))


def test_norms_alone_for_a_method_without_embeddings(images: Path, tmp_path: Path) -> None:
    result = train(model(), settings(images, tmp_path, method="tome", learn=["norms", "biases"], norm_lr=1e-2))
    untrained = dtem.patch(model(), "tome", norms=True, biases=True).method.state_dict()
    moved = {name for name, part in result.handle.method.state_dict().items() if not torch.equal(part, untrained[name])}
    assert {name.rsplit(".", 2)[-2] for name in moved} >= {"norm1", "norm2", "norm", "qkv", "fc1"}
    assert dtem.from_pretrained(tmp_path / "adapter.safetensors", model()).method.name == "tome"
    with pytest.raises(DtemError, match=r"'tome' has no trained parts that learn = embeddings names; add norms"):
        train(model(), settings(images, tmp_path / "none", method="tome", learn=["embeddings"]))


def test_a_run_can_start_from_an_adapter(images: Path, tmp_path: Path) -> None:
    first = train(model(), settings(images, tmp_path / "first", learn=["embeddings"]))
    config = settings(images, tmp_path / "second", learn=["norms"], adapter=str(tmp_path / "first/adapter.safetensors"))
    second = train(model(), config)
    for name, part in first.handle.method.state_dict().items():
        assert torch.equal(part, second.handle.method.state_dict()[name]), "embeddings stay as they were"
    assert any(part.any() for part in second.handle.method.affine.parameters())
    listed = storage.trained_on(storage.read(tmp_path / "second/adapter.safetensors")[0])
    assert len(listed) == len({path.name for path in images.glob("*/*.png")})
    with pytest.raises(DtemError, match=r"adapter\.safetensors: it has nothing that method 'tome' learns here"):
        train(model(), dataclasses.replace(config, out=str(tmp_path / "third"), method="tome"))


def test_end_to_end_takes_turns(images: Path, tmp_path: Path) -> None:
    """Of three updates the first trains the embeddings, the others the host."""
    seen = []
    for updates in (1, 2):
        host = model(0.1)
        before = state(host)
        train(host, settings(images, tmp_path / str(updates), mode="end-to-end", embedding_every=3, updates=updates))
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
@pytest.mark.usefixtures("ablations")
def test_baselines_learn_in_the_host(images: Path, tmp_path: Path, mode: str, method: str) -> None:
    host = model()
    before = state(host)
    train(host, settings(images, tmp_path, mode=mode, method=method, updates=2))
    after = state(host)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "model.safetensors").exists()


def test_self_distillation_needs_no_labels_and_lowers_the_loss(images: Path, tmp_path: Path) -> None:
    flat_folder = tmp_path / "photos"
    flat_folder.mkdir()
    for file in images.glob("*/*.png"):
        (flat_folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DtemError, match=r"no labels.*loss = 'distill'"):
        train(model(), settings(flat_folder, tmp_path / "a"))
    host = model()
    with torch.no_grad():
        host.head.weight.mul_(20)  # a random head says nothing much
    train(
        host,
        settings(flat_folder, tmp_path / "b", loss="distill", updates=30, batch_size=24, flip=False, crop="none"),
    )
    losses = [json.loads(line)["loss"] for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_evaluation_on_the_way_and_the_best_of_it(images: Path, tmp_path: Path) -> None:
    config = settings(images, tmp_path, eval_data=str(images), eval_r="0,4", eval_every=2, updates=4, save_every=3)
    result = train(model(), config)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    scores = [line["eval/score"] for line in lines if "eval/score" in line]
    assert len(scores) == 2
    assert set(result.outcomes) == {"0", "4"}
    best = dtem.from_pretrained(tmp_path / "best.safetensors", model())
    from dtem.data.loader import Loader
    from dtem.data.preprocessing import resolve_data_config
    from dtem.data.sources import open_source
    from dtem.data.transforms import eval_transform

    again = evaluator.sweep(
        best, Loader(open_source(str(images)), eval_transform(resolve_data_config(best.model)), 8), ["0", "4"]
    )
    assert sum(outcomes.mean_loss for outcomes in again.values()) / 2 == pytest.approx(min(scores), abs=1e-5)


@pytest.mark.parametrize("mode", ["modular", "end-to-end"])
def test_a_run_in_two_parts_is_the_whole_run(
    images: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "mode": mode,
        "embedding_every": 2,
        "updates": 5,
        "save_every": 2,
        "mixup": 0.8,
        "batch_size": 8,
        "r": "2,4",
    }
    uninterrupted = model(0.2)
    train(uninterrupted, settings(images, tmp_path / "whole", **changes))

    from dtem.training import loop

    step = loop.TrainingRun._step

    def stop(self: Any, *args: Any) -> Any:
        if self.update == 3:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(loop.TrainingRun, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train(model(0.2), settings(images, tmp_path / "parts", **changes))
    monkeypatch.undo()
    parts = model(0.2)
    assert train(parts, settings(images, tmp_path / "parts", **changes)).updates == 5
    for name, tensor in state(uninterrupted).items():
        assert torch.equal(tensor, state(parts)[name]), name


@pytest.mark.parametrize("place", ["update", "evaluation"])
def test_ctrl_c_saves_the_last_finished_update_and_propagates(
    images: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an update it lets the update end; an evaluation it interrupts, and the resumed run repeats that."""
    changes = {"updates": 5, "save_every": 100, "eval_data": str(images), "eval_r": "0,4", "eval_every": 3}
    uninterrupted, stopped = model(), model()
    train(uninterrupted, settings(images, tmp_path / "whole", **changes))
    from dtem.training import classification, loop

    step, evaluate = loop.TrainingRun._step, classification.Classification.run_evaluation

    def step_and_stop(self: Any, *args: Any) -> Any:
        if self.update == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    def stop_and_evaluate(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the evaluation was not interrupted")

    if place == "update":
        monkeypatch.setattr(loop.TrainingRun, "_step", step_and_stop)
    else:
        monkeypatch.setattr(classification.Classification, "run_evaluation", stop_and_evaluate)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(stopped, settings(images, tmp_path / "stopped", **changes))
    assert caught.value.__notes__[0].startswith("stopped after update 3 of 5; the same command resumes it from there")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert evaluate is classification.Classification.run_evaluation
    resumed = model()
    train(resumed, settings(images, tmp_path / "stopped", **changes))
    for name, tensor in state(uninterrupted).items():
        assert torch.equal(tensor, state(resumed)[name]), name
    _assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_ctrl_c_a_second_time_stops_at_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtem.training import loop, stop_signals

    step = loop.TrainingRun._step
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)

    def stop_twice(self: Any, *args: Any) -> Any:
        if self.update == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(loop.TrainingRun, "_step", stop_twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(model(), settings(images, tmp_path, updates=5, save_every=2))
    note = "stopped in update 4 of 5, without saving it; the same command resumes it after update 2"
    assert caught.value.__notes__[0].startswith(note)
    assert torch.load(tmp_path / "last.pt", weights_only=True)["update"] == 2


def test_accumulation_is_a_larger_batch(images: Path, tmp_path: Path) -> None:
    one, two = model(), model()
    train(one, settings(images, tmp_path / "1", updates=3, loss="both"))
    train(two, settings(images, tmp_path / "2", updates=3, loss="both", grad_accum_steps=2))
    for name, tensor in state(one).items():
        torch.testing.assert_close(tensor, state(two)[name], rtol=0, atol=3e-4)  # the updates moved them by 0.02


def test_checkpointing_and_bf16_train_too(images: Path, tmp_path: Path) -> None:
    one, two = model(), model()
    train(one, settings(images, tmp_path / "1"))
    train(two, settings(images, tmp_path / "2", grad_checkpointing=True))
    for name, tensor in state(one).items():
        torch.testing.assert_close(tensor, state(two)[name], rtol=1e-4, atol=1e-5)


def test_precisions_one_after_the_other(images: Path, tmp_path: Path) -> None:
    """accelerate has one precision per process; each run sets its own, and the caller's is back afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    own = Accelerator(mixed_precision="bf16")
    losses = [
        train(model(), settings(images, tmp_path / str(index), dtype=dtype)).loss
        for index, dtype in enumerate(("float32", "bfloat16", "float32"))
    ]
    assert losses[0] == losses[2] != losses[1] == pytest.approx(losses[0], rel=0.05)
    assert own.mixed_precision == "bf16"
    AcceleratorState._reset_state()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 9, "grad_accum_steps": 2}, "batch_size = 9 cannot be split"),
        ({"batch_size": 1000}, "holds 24 images"),
        ({"data": "nowhere"}, "nowhere"),
        ({"data": ""}, "no training data"),
        ({"method": "tome", "mode": "end-to-end"}, "no soft mode"),
        ({"learn": []}, "learn = .* trains nothing"),
        ({"norm_share": 1.0}, "norm_share = 1.0"),
        ({"r": "0"}, "r = 0 merges nothing in the first 2 blocks"),
        ({"r": "4,0"}, "r = 0 merges nothing"),
        ({"r": "0/0/4"}, "r = 0/0/4 merges nothing"),
        ({"options": {"warmth": 1}}, "no option 'warmth'"),
        ({"mode": "finetune", "method": "tome", "host_lr": 1e20}, "the loss is .* lower the learning rate"),
    ],
)
def test_mistakes_are_named(images: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        train(model(), settings(images, tmp_path, **changes))


def test_a_run_goes_on_only_as_it_began(images: Path, tmp_path: Path) -> None:
    train(model(), settings(images, tmp_path, updates=1))
    with pytest.raises(DtemError, match=r"lr = 0.01, now it is 0.5"):
        train(model(), settings(images, tmp_path, updates=1, lr=0.5))
    assert train(model(), settings(images, tmp_path, updates=1, lr=0.5), restart=True).updates == 1
    other = model()
    with torch.no_grad():
        other.norm.weight[0] += 1e-3
    with pytest.raises(DtemError, match=r"began with other weights of vit_tiny_patch16_224"):
        train(other, settings(images, tmp_path, updates=1, lr=0.5))
    (tmp_path / "last.pt").write_bytes(b"nonsense")
    with pytest.raises(DtemError, match=r"last.pt is damaged"):
        train(model(), settings(images, tmp_path, updates=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, name: state.pop(name), "lacks the weights dtem.method"),
        (lambda state, name: state.update(surplus=state[name]), "has unexpected weights surplus"),
        (lambda state, name: state.update({name: state[name][:1]}), "has other shapes of the weights dtem.method"),
    ],
)
def test_a_checkpoint_with_other_weights_is_refused(images: Path, tmp_path: Path, change: Any, message: str) -> None:
    train(model(), settings(images, tmp_path, updates=1))
    path = tmp_path / checkpoint_store.CHECKPOINT
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["model"], next(iter(checkpoint["model"])))
    torch.save(checkpoint, path)
    with pytest.raises(DtemError, match=message):
        train(model(), settings(images, tmp_path, updates=1))


SIMPLE = [None, True, -1, 3.5, "text", [], [None], {}, {"a": 1}, {0: {"step": 1}}, torch.zeros(2)]


def test_a_checkpoint_that_was_tampered_with_is_refused(images: Path, tmp_path: Path) -> None:
    """Every value of the checkpoint replaced by a value of every simple type: resumed, or refused by name."""
    config = settings(images, tmp_path, updates=1)
    train(model(), config)
    path = tmp_path / checkpoint_store.CHECKPOINT
    genuine = path.read_bytes()

    def refused(change: Any) -> bool:
        checkpoint = torch.load(io.BytesIO(genuine), weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)
        message = ""
        try:
            train(model(), config)
        except DtemError as error:
            message = str(error)
        assert not message or "last.pt is damaged" in message or "holds a run" in message
        return bool(message)

    for name in torch.load(path, weights_only=True):
        assert refused(lambda checkpoint, name=name: checkpoint.pop(name)), name
        for value in SIMPLE:
            harmless = name == "scaler" or (name in ("seconds", "best", "loss") and isinstance(value, float))
            change = {name: value}
            assert refused(lambda checkpoint, change=change: checkpoint.update(change)) != harmless, change
    for value in SIMPLE:
        for place in (("model",), ("optimisers",), ("optimisers", "embeddings"), ("optimisers", "embeddings", 0)):

            def replace(checkpoint: Any, place: tuple[Any, ...] = place, value: Any = value) -> None:
                for part in place:
                    checkpoint = checkpoint[part]
                checkpoint[next(iter(checkpoint))] = value

            assert refused(replace), (place, value)
    state = torch.load(io.BytesIO(genuine), weights_only=True)["optimisers"]["embeddings"]
    assert refused(lambda checkpoint: checkpoint["optimisers"]["embeddings"][0].update(exp_avg=torch.zeros(3, 3)))
    assert refused(lambda checkpoint: checkpoint["optimisers"]["embeddings"].update({99: state[0]}))
    assert refused(lambda checkpoint: checkpoint["optimisers"]["embeddings"][0]["exp_avg"].add_(1e-3))
    assert not refused(lambda checkpoint: None)


def test_a_byte_of_the_checkpoint_that_has_changed_is_noticed(images: Path, tmp_path: Path) -> None:
    config = settings(images, tmp_path, updates=1)
    train(model(), config)
    path = tmp_path / checkpoint_store.CHECKPOINT
    genuine = path.read_bytes()
    weight = next(iter(torch.load(path, weights_only=True)["model"].values())).numpy().tobytes()
    content = bytearray(genuine)
    content[genuine.index(weight) + 10] ^= 64
    path.write_bytes(content)
    with pytest.raises(DtemError, match=r"last.pt is damaged.*changed since"):
        train(model(), config)
    random = np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(genuine)
        content[random.integers(len(content))] ^= 1 << int(random.integers(8))
        path.write_bytes(content)
        with contextlib.suppress(DtemError):
            train(model(), config)


def test_two_runs_into_one_folder_are_refused(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    size = ["--batch-size", "8", "--updates", "100000"]
    with _running(images, out, *size) as first:
        second = _python(*_command(images, out, *size))
        assert second.returncode == 2
        assert f"{out} is in use by another training run (process {first.pid} on" in second.stderr
        assert first.poll() is None
        with pytest.raises(DtemError, match="is in use by another training run"):
            train(model(), settings(images, out), restart=True)
    assert not list(out.glob("*.lock*"))
    train(model(), settings(images, out), restart=True)


def test_a_run_ends_after_max_seconds(images: Path, tmp_path: Path) -> None:
    report = train(model(), settings(images, tmp_path, updates=0, max_seconds=1e-3))
    assert report.updates == 1
    assert (tmp_path / "adapter.safetensors").exists()
    again = train(model(), settings(images, tmp_path, updates=0, max_seconds=1e-3))
    assert again.updates == 1, "the time of the first part counts"


def test_trackers_get_what_the_log_gets(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(model(), settings(images, tmp_path, updates=2, log_with=["tensorboard"]))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (tmp_path / "trackers").rglob("events.out.*")
    board = EventAccumulator(str(events)).Reload()
    logged = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [scalar.value for scalar in board.Scalars("loss")] == pytest.approx(logged)


def test_a_tracker_that_is_not_installed_is_named(images: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DtemError, match=r"needs the package wandb .*\.\[wandb\]"):
        train(model(), settings(images, tmp_path, log_with=["wandb"]))


def test_the_report_prints_as_a_table(images: Path, tmp_path: Path) -> None:
    report = train(model(), settings(images, tmp_path, updates=1, eval_data=str(images), eval_r="0,4"))
    text = str(report)
    assert "top-1" in text
    assert "1 updates, last loss" in text
    assert report.to_dict()["evaluation"][1]["r"] == "4"
    assert json.loads((tmp_path / "record.json").read_text())["results"][0]["updates"] == 1
    assert "<table>" in report._repr_html_()
    assert len(repr(report)) < 200


def test_what_is_frozen_stays_frozen(images: Path, tmp_path: Path) -> None:
    host = model()
    host.patch_embed.requires_grad_(False)
    before = state(host)
    train(host, settings(images, tmp_path / "some", mode="finetune", method="tome"))
    moved = {name.partition(".")[0] for name, part in before.items() if not torch.equal(state(host)[name], part)}
    assert moved == {"cls_token", "pos_embed", "blocks", "norm", "head"}
    with pytest.raises(DtemError, match="all of it is frozen"):
        train(model().requires_grad_(False), settings(images, tmp_path / "all", mode="finetune", method="tome"))


def test_an_adapter_serves_the_largest_r_of_several(images: Path, tmp_path: Path) -> None:
    train(model(), settings(images, tmp_path, r="2,4,3"))
    assert dtem.adapters.storage.read(tmp_path / "adapter.safetensors")[0]["trained_r"] == "4"


def test_another_size_and_the_settings_that_a_run_leaves(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ["--model", "vit_tiny_patch16_224", "--random-weights", "--img-size", "32", "--num-classes", "3"]
    plain = ["--mixup", "0", "--cutmix", "0", "--workers", "0", "--batch-size", "2", "--updates", "1", "--r", "1"]
    assert main(["train", *host, "--data", str(images), "--out", str(tmp_path / "a"), *plain]) == 0
    config_file = tmp_path / "a" / "config.yaml"
    assert main(["train", "--random-weights", "--config", str(config_file), "--out", str(tmp_path / "b")]) == 0
    one, two = (load_file(tmp_path / name / "adapter.safetensors") for name in "ab")
    assert all(torch.equal(part, two[name]) for name, part in one.items())
    capsys.readouterr()
    for flags, message in (
        (["--pixel-norm", "half"], "--pixel-norm half is for a Segmenter"),
        (["--num-beams", "2"], "is for captioning"),
    ):
        assert main(["train", *host, "--data", str(images), "--out", str(tmp_path / "c"), *plain, *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_full_log_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here to stand for a full disk")
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(DtemError, match="No space left"), Log(tmp_path, open_accelerator(TrainConfig())) as log:
        log.step(1, {"loss": 1.0})


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(model(), settings(images, tmp_path, updates=1))
    before = (tmp_path / "last.pt").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DtemError, match=r"cannot be written .No space left"):
        train(model(), settings(images, tmp_path / "new", updates=1))
    with pytest.raises(DtemError, match="cannot be written"):
        train(model(), settings(images, tmp_path, updates=1))
    assert (tmp_path / "last.pt").read_bytes() == before


def test_corrupt_images_are_counted_or_fatal(images: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(images, broken)
    (broken / "1" / "1_0.png").write_bytes(b"not a picture")
    result = train(model(), settings(broken, tmp_path / "a", updates=3))
    assert list(result.skipped) == ["1/1_0.png"]
    with pytest.raises(DtemError, match=r"1_0.png"):
        train(model(), settings(broken, tmp_path / "b", updates=3, on_decode_error="stop"))


def test_a_label_outside_the_head_is_found_before_the_first_step(images: Path, tmp_path: Path) -> None:
    host = model()
    host.reset_classifier(2)
    with pytest.raises(DtemError, match=r"label 2.*2 classes"):
        train(host, settings(images, tmp_path))


def _python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=280)


def _command(images: Path, out: Path, *more: str) -> list[str]:
    plain = ["--mixup", "0", "--cutmix", "0", "--auto", "", "--erasing", "0", "--workers", "0", "--save-every", "1"]
    host = ["--model", "test_vit", "--random-weights", "--num-classes", "3", "--img-size", "64"]
    return ["-m", "dtem.cli", "train", *host, "--data", str(images), "--out", str(out), "--r", "3", *plain, *more]


@contextlib.contextmanager
def _running(images: Path, out: Path, *more: str, launcher: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, after its third update; at the end it is told to stop."""
    command = [sys.executable, *launcher, *_command(images, out, *more)[bool(launcher) :]]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log, deadline = out / "log.jsonl", time.monotonic() + 200
    try:
        while not (log.exists() and len(log.read_text().splitlines()) >= 3):
            assert process.poll() is None, "the run ended before it could be stopped"
            assert time.monotonic() < deadline, "the run never began"
            time.sleep(0.01)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=100)


@pytest.fixture(scope="module")
def uninterrupted(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    uninterrupted = _python(*_command(images, out, *LONGER, "--eval-data", str(images)))
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    return out


LONGER = ["--batch-size", "8", "--updates", "40", "--lr", "1e-2", "--eval-r", "0,3", "--eval-every", "7"]


def _assert_same_run(one: Path, two: Path) -> None:
    """Both runs ended with the same weights and the same log."""
    for name in ("adapter", "best"):
        expected, resumed = (load_file(out / f"{name}.safetensors") for out in (one, two))
        assert expected.keys() == resumed.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, resumed[key]), key
    logs = []
    for out in (one, two):
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        logs.append([{key: value for key, value in line.items() if key != "data/waiting"} for line in lines])
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, "0"), (signal.SIGINT, "1"), (signal.SIGTERM, "1")])
def test_a_stopped_run_ends_with_the_weights_of_an_uninterrupted_one(
    images: Path, tmp_path: Path, uninterrupted: Path, number: int, workers: str
) -> None:
    """As from a terminal: the signal reaches the run and its workers."""
    out = tmp_path / "stopped"
    more = [*LONGER, "--eval-data", str(images), "--workers", workers]
    rare = [*more, "--save-every", "1000"] if number != signal.SIGKILL else more
    with _running(images, out, *rare) as process:
        os.killpg(process.pid, number)
        _, printed = process.communicate(timeout=100)
    files = {path.name for path in out.iterdir()}
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL, "it was done before it was killed; make the run longer"
    else:
        assert process.returncode == 128 + number, printed
        assert files == {"adapter.safetensors", "config.yaml", "last.pt", "log.jsonl"} | files & {"best.safetensors"}
        saved = torch.load(out / "last.pt", weights_only=True)["update"]
        hint = f"stopped after update {saved} of 40; the same command resumes it from there; the adapter so far: "
        assert f"{hint}{out / 'adapter.safetensors'}" in printed
        assert "Traceback" not in printed
        assert saved >= 3
    resumed = _python(*_command(images, out, *rare))
    assert resumed.returncode == 0, resumed.stderr
    _assert_same_run(uninterrupted, out)


TWO_PROCESSES = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
TWO_PROCESSES += ["--master-port", "29517", "-m", "--"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_two_processes_stop_together(images: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "stopped"
    size = ["--batch-size", "8", "--updates", "100000", "--save-every", "100000"]
    with _running(images, out, *size, launcher=TWO_PROCESSES) as process:
        started = time.monotonic()
        os.killpg(process.pid, number)
        _, printed = process.communicate(timeout=100)
    assert time.monotonic() - started < 25, "the launcher kills after 30 s"
    saved = torch.load(out / "last.pt", weights_only=True)["update"]
    assert f"stopped after update {saved} of 100000; the same command resumes it from there" in printed
    assert printed.count("stopped after update") == 1, "one of them speaks for both"
    logged = [json.loads(line)["update"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert logged[-1] == saved
    assert not list(out.glob("*.lock*"))


def test_two_processes_train_as_one_with_twice_the_batch(images: Path, tmp_path: Path) -> None:
    size = ["--batch-size", "8", "--updates", "4", "--lr", "1e-3", "--eval-data", str(images), "--eval-r", "0,3"]
    one = _python(*_command(images, tmp_path / "one", *size))
    assert one.returncode == 0, one.stderr
    command = _command(images, tmp_path / "two", *size, "--json")[1:]
    two = _python(*TWO_PROCESSES, *command)
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout)["updates"] == 4, "one of them speaks for both"
    expected, state = (load_file(tmp_path / name / "adapter.safetensors") for name in ("one", "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-5)
    scores = [
        [
            json.loads(line)["eval/score"]
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
            if "eval" in line
        ]
        for name in ("one", "two")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
