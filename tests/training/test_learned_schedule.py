"""The schedule is learned beside the embedding, in the trainer, and left behind in its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from torch import nn

import dtem
from dtem.measure import flops
from dtem.training.config import TrainConfig, build
from dtem.training.loop import Run, train
from dtem.types import DtemError

from . import test_loop
from .test_loop import CLASSES, CONFIG, settings, state

images = test_loop.images
GFLOPS = 0.0018


def model() -> nn.Module:
    """Of 64 patches, so that one token is little."""
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=3, embed_dim=32, num_heads=2, num_classes=CLASSES
    )


def learned(images: Path, out: Path, **changes: Any) -> TrainConfig:
    return settings(images, out, **{"schedule": "learned", "gflops": GFLOPS, "updates": 6, "lr": 2e-2, **changes})


def cost(handle: dtem.Handle) -> float:
    return flops.count(handle.model, handle.host.image).macs / 1e9


@pytest.mark.parametrize("method", ["dtem", "tome_gumbel"])
def test_rates_and_embeddings_are_learned_and_left_behind(images: Path, tmp_path: Path, method: str) -> None:
    host = model()
    before = state(host)
    config = learned(images, tmp_path, method=method, eval_data=str(images))
    result = train(host, config, CONFIG)
    after = state(host)
    assert all(torch.equal(before[name], after[name]) for name in before)

    constant = dtem.patch(model(), method, f"{GFLOPS}G")
    plan = result.handle.plan
    assert result.handle.r == "learned"
    assert set(result.outcomes) == {"learned"}, "evaluated at what is learned, unless asked otherwise"
    assert result.handle.method.rates.offset.abs().min() > 0.003, "every rate has moved"
    assert plan != constant.plan
    assert -0.01 <= cost(result.handle) / cost(constant) - 1 <= 1e-6
    assert -0.03 <= cost(result.handle) / GFLOPS - 1 <= 1e-6

    untrained = dtem.patch(model(), method).method.state_dict()
    moved = {name for name in untrained if not torch.equal(untrained[name], after[f"dtem.method.{name}"])}
    assert {name.split(".")[1] for name in moved} == {"0", "1"}

    x = torch.randn(2, 3, 32, 32)
    for r in (None, "learned"):
        loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model(), r)
        assert loaded.plan == plan
        torch.testing.assert_close(loaded.model.eval()(x), host(x))
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        header = json.loads(file.metadata()["dtem"])
    assert header["trained_r"] == f"{GFLOPS}G"
    assert dtem.from_pretrained(tmp_path / "best.safetensors", model(), header["schedule"]).plan == tuple(
        dtem.from_pretrained(tmp_path / "best.safetensors", model(), "learned").plan
    )


def test_the_log_has_every_rate(images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(model(), learned(images, tmp_path, eval_data=str(images), updates=2), CONFIG)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [sum(name.startswith("r/") and name[2:].isdigit() for name in line) for line in steps] == [3, 3]
    assert all("loss/flops" in line for line in steps)
    assert "at " + "/".join(map(str, result.handle.plan)) in capfd.readouterr().err


def test_a_run_goes_on_with_its_rates(images: Path, tmp_path: Path) -> None:
    whole = train(model(), learned(images, tmp_path / "whole"), CONFIG)
    config = learned(images, tmp_path / "halves", save_every=3)
    run = Run(model(), config, CONFIG, False)
    step, made = run._step, []

    def interrupted(passes: Any) -> dict[str, float]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(1)
        return step(passes)

    run._step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.go()
    again = train(model(), config, CONFIG)
    assert torch.equal(again.handle.method.rates.offset, whole.handle.method.rates.offset)
    assert again.handle.plan == whole.handle.plan


def test_a_run_from_before_a_setting_existed_goes_on(images: Path, tmp_path: Path) -> None:
    config = settings(images, tmp_path, updates=2)
    train(test_loop.model(), config, CONFIG)
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    old = json.loads(saved["config"])
    del old["schedule"], old["gflops"]
    torch.save({**saved, "config": json.dumps(old)}, tmp_path / "last.pt")
    assert train(test_loop.model(), config, CONFIG).updates == 2


def test_diffrate_learns_towards_the_same_flag(images: Path, tmp_path: Path) -> None:
    result = train(model(), learned(images, tmp_path, method="diffrate", updates=2), CONFIG)
    assert result.handle.r == "learned"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all("loss/flops" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "tome"}, "'tome' learns no rates"),
        ({"method": "dynamicvit"}, "'dynamicvit' learns no rates"),
        ({"gflops": 1e-5}, "cannot be met"),
        ({"gflops": 1.0}, "merges nothing"),
    ],
)
def test_what_cannot_be_learned_is_found_before_the_first_update(
    images: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DtemError, match=message):
        train(model(), learned(images, tmp_path, **changes), CONFIG)
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "learned"}, "give --gflops"),
        ({"schedule": "learnt", "gflops": 1.0}, "schedule = 'learnt'.*given, learned"),
        ({"gflops": 0.65}, "gflops = 0.65 goes with schedule = 'learned'.*r = '0.65G'"),
        ({"schedule": "learned", "gflops": -1.0}, "gflops = -1.0"),
        ({"options": {"learn_rates": True}}, "learn_rates goes with schedule = 'learned'"),
        ({"schedule": "learned", "gflops": 0.65, "mode": "finetune"}, "'modular', not 'finetune'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        build(values)


def test_rates_to_evaluate_at() -> None:
    assert build({}).eval_rates == ("0", "8", "13", "16")
    assert build({"schedule": "learned", "gflops": 0.65}).eval_rates == ("learned",)
    assert build({"schedule": "learned", "gflops": 0.65, "eval_r": "learned, 16"}).eval_rates == ("learned", "16")
