"""The Fisher loss: its terms, the candidates of a soft forward, and training runs with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtem
from dtem import ops
from dtem.errors import DtemError
from dtem.tasks.classification.loss import fisher_probes
from dtem.training import loop
from tests.contract import hosts
from tests.training import test_loop

images = test_loop.images


@pytest.mark.parametrize(("tokens", "prefix"), [(8, 0), (9, 1), (11, 2), (12, 5)])
def test_the_change_of_a_linear_output_is_exact(tokens: int, prefix: int) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 2, tokens, 3, dtype=torch.float64).unbind(0)
    size = torch.rand(2, tokens, dtype=torch.float64) + 0.5
    change = ops.output_change(x, size, gradient, prefix)
    a_side = range(prefix + prefix % 2, tokens, 2)
    b_side = range(prefix + 1 - prefix % 2, tokens, 2)
    assert change.shape == (2, len(a_side), len(b_side))
    for image in range(2):
        for row, i in enumerate(a_side):
            for column, j in enumerate(b_side):
                moved = x[image].clone()
                pair = torch.tensor([i, j])
                moved[pair] = (size[image, pair, None] * x[image, pair]).sum(dim=0) / size[image, pair].sum()
                expected = (gradient[image] * (moved - x[image])).sum()
                torch.testing.assert_close(change[image, row, column], expected)


@pytest.mark.parametrize("probabilities", [True, False])
def test_half_the_expected_square_of_a_probe_is_the_divergence(probabilities: bool) -> None:
    torch.manual_seed(0)
    output, change = torch.randn(1, 5, dtype=torch.float64), 0.02 * torch.randn(1, 5, dtype=torch.float64)
    probes = fisher_probes(output.float().requires_grad_(), 4000, probabilities)
    point = output.float().requires_grad_()
    torch.manual_seed(1)
    slopes = torch.autograd.functional.jacobian(lambda at: same_probes(at, probabilities), point)[:, 0]
    assert probes.shape == (4000,)
    expected = (slopes.double() @ change[0]).square().mean() / 2
    if probabilities:
        log_p, log_q = output.log_softmax(dim=1), (output + change).log_softmax(dim=1)
        divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    else:
        divergence = 1 - F.cosine_similarity(output, output + change).sum()
    assert expected.item() == pytest.approx(divergence.item(), rel=0.15)


def same_probes(output: torch.Tensor, probabilities: bool) -> torch.Tensor:
    torch.manual_seed(2)
    return fisher_probes(output, 4000, probabilities)


@pytest.mark.parametrize("name", ["deit", "mae", "dinov2_registers"])
def test_half_of_the_blocks_merge_and_the_others_give_candidates(name: str) -> None:
    model, handle = hosts.patched(name, "dtem", 3, fisher=True)
    handle.mode = "soft"
    for seed in range(4):
        torch.manual_seed(seed)
        with handle.auxiliary_losses() as losses:
            output = model(hosts.images(name))
        trainable = handle.host.num_trainable_blocks
        torch.manual_seed(seed)
        draw = torch.randint(2, ((handle.host.depth + 1) // 2,)).tolist()
        candidates = [layer for layer in range(trainable) if draw[layer // 2] != layer % 2]
        assert len(losses.merge_candidates) == len(candidates)
        handle.mode = "hard"
        handle.r = [0 if layer in candidates or layer >= trainable else 6 for layer in range(handle.host.depth)]
        torch.testing.assert_close(output, model(hosts.images(name)), rtol=1e-5, atol=1e-5)
        handle.mode, handle.r = "soft", 3


def test_every_trained_embedding_gets_a_gradient() -> None:
    model, handle = hosts.patched("mae", "dtem", 3, fisher=True)
    model.requires_grad_(False)
    handle.method.requires_grad_(True)
    handle.mode = "soft"
    for seed in range(6):
        torch.manual_seed(seed)
        with handle.auxiliary_losses() as losses:
            output = model(hosts.images("mae"))
        ops.fisher_loss(fisher_probes(output, 2), losses.merge_candidates).backward()
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("r", [5, 6, 8])
def test_few_tokens(r: int) -> None:
    """A block that merged 2r tokens leaves its neighbour fewer than the schedule counted on."""
    model = test_loop.model()  # 16 patches, 3 blocks
    handle = dtem.patch(model, "dtem", r, fisher=True)
    handle.mode = "soft"
    for seed in range(8):
        torch.manual_seed(seed)
        with handle.auxiliary_losses() as losses:
            output = model(torch.randn(2, 3, 32, 32))
        loss = ops.fisher_loss(fisher_probes(output, 2, True), losses.merge_candidates)
        assert torch.isfinite(loss)


def test_the_loss_falls() -> None:
    model, handle = hosts.patched("deit", "dtem", 5, fisher=True, temperature=0.3)
    model.requires_grad_(False)
    handle.method.embeddings.requires_grad_(True)
    handle.mode = "soft"
    optimiser = torch.optim.SGD(handle.method.embeddings.parameters(), lr=5.0)
    values = []
    for _ in range(12):
        torch.manual_seed(0)
        with handle.auxiliary_losses() as losses:
            output = model(hosts.images("deit"))
        first = losses.merge_candidates[:1]  # its tokens never change
        loss = ops.fisher_loss(fisher_probes(output, 2), first)
        values.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert values[-1] < 0.95 * values[0], values


def test_a_resumed_run_ends_as_an_uninterrupted_one(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"loss": "distill", "options": {"fisher": True}, "updates": 4, "save_every": 2}
    settings = test_loop.settings(images, tmp_path / "whole", **changes)
    trained = test_loop.state(test_loop.train(test_loop.model(), settings).handle.method)
    initial = test_loop.state(dtem.patch(test_loop.model(), "dtem", fisher=True, norms=True).method)
    assert any(not torch.equal(trained[name], initial[name]) for name in trained)
    parts, step = test_loop.settings(images, tmp_path / "parts", **changes), loop.TrainingRun._step

    def stop_at_two(self: Any, *args: Any) -> Any:
        if self.update == 2:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(loop.TrainingRun, "_step", stop_at_two)
    with pytest.raises(KeyboardInterrupt):
        test_loop.train(test_loop.model(), parts)
    monkeypatch.undo()
    resumed = test_loop.state(test_loop.train(test_loop.model(), parts).handle.method)
    for name, part in trained.items():
        assert torch.equal(part, resumed[name]), name


def test_settings_that_exclude_it_are_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DtemError, match="choose one"):
        dtem.patch(hosts.fresh("deit"), fisher=True, sparse=True)
    with pytest.raises(DtemError, match="fisher = 1"):
        dtem.patch(hosts.fresh("deit"), fisher=1)
    for changes in ({"loss": "task"}, {"loss": "distill", "grad_checkpointing": True}):
        with pytest.raises(DtemError, match="option fisher goes with"):
            test_loop.settings(images, tmp_path, options={"fisher": True}, **changes)
