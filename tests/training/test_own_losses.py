"""Methods with losses of their own, in the trainer: predictors and rates learn, and what was learned is left behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtem
from dtem.errors import DtemError
from dtem.methods import Method

from . import test_loop
from .test_loop import model, settings, state, train

images = test_loop.images


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def changed(before: dict[str, torch.Tensor], host: nn.Module) -> set[str]:
    return {name for name, part in state(host).items() if name in before and not torch.equal(part, before[name])}


@pytest.mark.parametrize("loss", ["task", "both"])
def test_predictors_learn_beside_a_frozen_host(images: Path, tmp_path: Path, loss: str) -> None:
    host = model()
    before = state(host)
    changes = {"method": "dynamicvit", "r": "0/4/4", "loss": loss, "grad_accum_steps": 2, "learn": ["embeddings"]}
    result = train(host, settings(images, tmp_path, **changes))
    assert changed(before, host) == set()
    untrained = dtem.patch(model(), "dynamicvit").method
    moved = {name.split(".")[1] for name in changed(state(untrained), result.handle.method)}
    assert moved == {"1", "2"}, "there is no loss for a stage that drops nothing"
    for line in lines(tmp_path):
        assert 0 < line["loss/ratio"] < line["loss"]
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model())
    assert loaded.plan == (0, 4, 4)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded.model.eval()(x), host(x))


def test_own_losses_are_part_of_what_is_minimised(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same runs with a hundred times the weight on the ratio: the logged loss is larger by what the ratio adds."""
    seen = []
    for weight in (0.01, 1.0):
        folder = tmp_path / str(weight)
        config = settings(images, folder, method="dynamicvit", r="0/8/0", updates=1, options={"ratio_weight": weight})
        train(model(), config)
        seen.append(lines(folder)[0])
    less, more = seen
    assert more["loss/ratio"] == pytest.approx(100 * less["loss/ratio"], rel=1e-4)
    assert more["loss"] - less["loss"] == pytest.approx(more["loss/ratio"] - less["loss/ratio"], rel=1e-3)
    monkeypatch.setattr(Method, "losses", lambda self, tokens: {})
    train(model(), settings(images, tmp_path / "dtem", updates=1))
    assert not [name for name in lines(tmp_path / "dtem")[0] if name.startswith("loss/")]


def test_what_is_random_in_a_method_is_so_beside_a_host_in_eval_mode(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtem.methods.dynamicvit import DynamicVit

    seen = []
    step = DynamicVit._mask

    def watch(self: DynamicVit, *args: Any) -> Any:
        seen.append(self.training)
        return step(self, *args)

    monkeypatch.setattr(DynamicVit, "_mask", watch)
    host = model()
    train(host, settings(images, tmp_path, method="dynamicvit", r="0/4/0", updates=2, learn=["embeddings"]))
    assert seen == [True, True]
    assert not any(module.training for module in host.modules())


def test_checkpointing_changes_nothing(images: Path, tmp_path: Path) -> None:
    hosts = []
    for again in (False, True):
        host = model()
        config = settings(images, tmp_path / str(again), method="dynamicvit", r="0/4/4", grad_checkpointing=again)
        train(host, config)
        hosts.append(state(host))
    for name, tensor in hosts[0].items():
        torch.testing.assert_close(hosts[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_predictors_and_host_take_turns(images: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    changes = {"mode": "end-to-end", "embedding_every": 2, "updates": 2, "r": "0/4/4", "host_r": "0/4/2"}
    train(host, settings(images, tmp_path, method="dynamicvit", **changes))
    assert changed(before, host)
    assert ["loss/ratio" in line for line in lines(tmp_path)] == [True, False]


def test_rates_are_learned_and_left_behind(images: Path, tmp_path: Path) -> None:
    host = model()
    before = state(host)
    config = settings(
        images,
        tmp_path,
        method="diffrate",
        r="0.0004G",
        lr=0.3,
        updates=12,
        eval_data=str(images),
        eval_r="learned,2",
        options={"flops_weight": 1e8, "step": 1},
    )
    result = train(host, config)
    assert changed(before, host) == set()
    losses = [line["loss/flops"] for line in lines(tmp_path) if "loss/flops" in line]
    assert losses[-1] < losses[0]
    assert result.handle.r == "learned"
    assert result.handle.plan == result.handle.method.schedule() != dtem.patch(model(), "diffrate").method.schedule()
    assert set(result.outcomes) == {"learned", "2"}
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", model())
    assert loaded.plan == result.handle.plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dynamicvit", "options": {"stages": [7]}}, "stages = "),
        ({"method": "dynamicvit", "options": {"stages": (1,)}, "r": "4"}, "block 0.*blocks 1 only"),
        ({"method": "dynamicvit", "options": {"stages": (1,)}, "r": "0/4/0", "eval_r": "4"}, "block 0.*blocks 1 only"),
        ({"eval_r": "learned"}, "'dtem' learns no schedule"),
    ],
)
def test_a_schedule_that_cannot_be_is_found_before_the_first_update(
    images: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DtemError, match=message):
        train(model(), settings(images, tmp_path, eval_data=str(images), **changes))
    assert not (tmp_path / "log.jsonl").exists()
