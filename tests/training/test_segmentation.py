"""Runs on a tiny Segmenter: what learns, by which loss, and that a stopped run ends as one that was not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dtem
from dtem.errors import DtemError
from dtem.models.segmenter import LinearDecoder, Segmenter, plain_encoder
from dtem.tasks.segmentation.loss import fisher_probes
from dtem.training.config import TrainConfig, presets, resolve
from tasks.segmentation.scenes import folder

from .test_loop import state, train


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("scenes") / "set")


def model(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Segmenter(plain_encoder(32, 3, 8, (32, 32)), LinearDecoder(32, classes), "tiny")


def settings(scenes: Path, out: Path, **changes: Any) -> TrainConfig:
    base = {"data": str(scenes), "out": str(out), "batch_size": 3, "updates": 4, "workers": 0}
    base |= {"r": "40%", "lr": 1e-2, "host_lr": 1e-3, "options": {"relaxed": 3}, "drop_path": 0.0}
    return TrainConfig.from_dict({**base, **changes})


def test_modular_changes_embeddings_alone(scenes: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    config = settings(scenes, tmp_path, eval_data=str(scenes), eval_r="0,40%", eval_every=2, learn=["embeddings"])
    result = train(host, config)
    after = state(host)
    assert all(torch.equal(before[name], after[name]) for name in before)
    start = state(dtem.patch(model(), relaxed=3).model)
    still = [name for name in after if name not in before and torch.equal(after[name], start[name])]
    assert still == [], "every component's embedding learns, those of the last block too"
    assert set(result.metrics) == {"0", "40%"}
    assert set(result.metrics["0"]) == {"miou", "pixel_accuracy", "class_accuracy"}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    scores = [line for line in lines if "eval/score" in line]
    mean = sum(scores[-1][f"eval/miou_r{rate}"] for rate in ("0", "40%")) / 2
    assert scores[-1]["eval/score"] == pytest.approx(100 - mean)
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model())
    assert loaded.plan == (6, 6, 6)  # 40 % of 16 patches
    x = torch.randn(1, 3, 32, 48)
    torch.testing.assert_close(loaded.model.eval()(x), host(x))


def test_fisher_initialisation_ignores_what_the_output_does_not_depend_on(scenes: Path, tmp_path: Path) -> None:
    """Two channels of each component's input that its weights pass over have no part in its embedding."""

    def blind() -> nn.Module:
        host = model()
        for block in host.encoder.blocks:
            for layer in (block.attn.qkv, block.mlp.fc1):
                nn.init.zeros_(layer.weight[:, :2])
        return host

    host = blind()
    config = settings(scenes, tmp_path / "a", fisher_init=2, updates=0, epochs=0)
    handle = train(host, config).handle
    for embedding in handle.method.embeddings:
        weight = embedding.affine.weight
        assert weight[:, :2].abs().max() < 1e-4 * weight.abs().max()
        assert weight[-1].abs().max() < 1e-6, "the last channel is the same for all"
    assert not handle.method.collecting_fisher
    trained = dtem.from_pretrained(tmp_path / "a" / "adapter.safetensors", blind())
    assert torch.equal(trained.method.embeddings[3].affine.weight, handle.method.embeddings[3].affine.weight)
    again = train(blind(), settings(scenes, tmp_path / "b", fisher_init=2, updates=0, epochs=0)).handle
    for one, other in zip(handle.method.parameters(), again.method.parameters(), strict=True):
        assert torch.equal(one, other)


def test_norms_learn_after_fisher_initialisation(scenes: Path, tmp_path: Path) -> None:
    only = train(model(), settings(scenes, tmp_path / "a", fisher_init=2, updates=0, epochs=0, learn=["embeddings"]))
    changes = {"fisher_init": 2, "updates": 2, "learn": ["norms"], "loss": "distill"}
    both = train(model(), settings(scenes, tmp_path / "b", **changes)).handle.method
    for mine, alone in zip(both.embeddings, only.handle.method.embeddings, strict=True):
        assert torch.equal(mine.affine.weight, alone.affine.weight), "the embeddings stay as they were initialised"
    assert any(parameter.abs().max() > 0 for parameter in both.affine.parameters())


def test_fisher_initialisation_that_cannot_be_is_refused(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(DtemError, match="leave grad_checkpointing out"):
        settings(scenes, tmp_path, fisher_init=2, grad_checkpointing=True)
    with pytest.raises(DtemError, match=r"epochs = 0\.0 must be more than 0"):
        settings(scenes, tmp_path, epochs=0)
    with pytest.raises(DtemError, match="'dtem' on a Segmenter, not for 'tome' on tiny: leave it out"):
        train(model(), settings(scenes, tmp_path / "a", fisher_init=1, mode="finetune", method="tome", options={}))
    with pytest.raises(DtemError, match="Fisher initialisation needs an embedding of one layer"):
        train(model(), settings(scenes, tmp_path, fisher_init=1, options={"hidden": (8,)}))


def test_the_host_learns_without_merging(scenes: Path, tmp_path: Path) -> None:
    host = model()
    config = settings(
        scenes,
        tmp_path,
        mode="finetune",
        method="tome",
        options={},
        r="0",
        updates=60,
        batch_size=6,
        host_lr=3e-3,
        eval_data=str(scenes),
        eval_r="0",
        eval_every=60,
        photometric=False,
        scales=(1.0, 1.0),
    )
    result = train(host, config)
    assert result.metrics["0"]["miou"] > 50, "three colours are learned in no time"
    assert (tmp_path / "best_model.safetensors").exists()
    fresh = model()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_self_distillation_lowers_what_merging_costs(scenes: Path, tmp_path: Path) -> None:
    host = model()
    with torch.no_grad():
        host.decoder.head.weight.mul_(50)
    config = settings(
        scenes, tmp_path, loss="distill", updates=30, batch_size=6, scales=(1.0, 1.0), photometric=False, flip=False
    )
    train(host, config)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_the_fisher_loss_trains_embeddings_alone(scenes: Path, tmp_path: Path) -> None:
    changes = {"loss": "distill", "options": {"fisher": True}, "updates": 8, "lr": 1e-2, "learn": ["embeddings"]}
    host = model()
    before = state(host)
    learned = train(host, settings(scenes, tmp_path, **changes)).handle.method.state_dict()
    assert all(torch.equal(part, state(host)[name]) for name, part in before.items())
    untrained = dtem.patch(model(), "dtem", fisher=True).method.state_dict()
    assert all(not torch.equal(part, learned[name]) for name, part in untrained.items() if name.endswith("weight"))


def test_fisher_probes_have_the_variance_of_a_pixel_on_average() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 5)
    probes = fisher_probes(logits, 20000)
    p = logits.softmax(1)
    spread = (p * logits.square()).sum(1) - (p * logits).sum(1).square()  # the variance of one pixel's own probe
    assert probes.var().item() == pytest.approx(2 * spread.mean().item(), rel=0.1)


@pytest.mark.parametrize("fisher_init", [0, 2])
def test_a_stopped_run_ends_as_one_that_was_not(scenes: Path, tmp_path: Path, monkeypatch, fisher_init: int) -> None:
    train(model(), settings(scenes, tmp_path / "whole", updates=5, save_every=2, fisher_init=fisher_init))

    from dtem.training import segmentation

    real, calls = segmentation.Segmentation.loss, []

    def stopping(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(segmentation.Segmentation, "loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(model(), settings(scenes, tmp_path / "parts", updates=5, save_every=2, fisher_init=fisher_init))
    monkeypatch.setattr(segmentation.Segmentation, "loss", real)
    train(model(), settings(scenes, tmp_path / "parts", updates=5, save_every=2, fisher_init=fisher_init))
    unsplit, parts = (load_file(tmp_path / name / "adapter.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(unsplit[name], parts[name]) for name in unsplit)


def test_classes_of_data_and_model_must_agree(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(DtemError, match="3 classes, the model 4: build it with num_classes = 3"):
        train(model(4), settings(scenes, tmp_path))
    with pytest.raises(DtemError, match="no training data"):
        train(model(), settings(scenes, tmp_path, data=""))


@pytest.mark.parametrize("name", ["segmenter", "segmenter_host", "segmenter_few"])
def test_presets(name: str) -> None:
    assert name in presets()
    config, host = resolve(name)
    assert (config.r, config.mode) == (("0", "finetune") if name == "segmenter_host" else ("40%", "modular"))
    if name == "segmenter":
        assert (config.updates, config.batch_size, config.lr, config.min_lr, config.weight_decay) == (
            40000,
            8,
            1e-4,
            1e-6,
            1e-4,
        )
        assert host["name"] == "seg_s_mask_16"
        assert config.cropping.short_side == 512
