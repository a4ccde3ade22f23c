"""Training by what every merge would do to the output: prices, offers, and runs that learn by them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import hosts
from tests.training import test_loop

import dtem
from dtem import adapters, ops
from dtem.tasks.classification.loss import readings
from dtem.training.loop import Run, train
from dtem.types import DtemError

images = test_loop.images


@pytest.mark.parametrize(("tokens", "prefix"), [(8, 0), (9, 1), (11, 2), (12, 5)])
def test_of_what_is_linear_in_the_tokens_the_effect_is_exact(tokens: int, prefix: int) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 2, tokens, 3, dtype=torch.float64).unbind(0)
    size = torch.rand(2, tokens, dtype=torch.float64) + 0.5
    found = ops.effect(x, size, gradient, prefix)
    a_side = range(prefix + prefix % 2, tokens, 2)
    b_side = range(prefix + 1 - prefix % 2, tokens, 2)
    assert found.shape == (2, len(a_side), len(b_side))
    for image in range(2):
        for row, i in enumerate(a_side):
            for column, j in enumerate(b_side):
                moved = x[image].clone()
                pair = torch.tensor([i, j])
                moved[pair] = (size[image, pair, None] * x[image, pair]).sum(dim=0) / size[image, pair].sum()
                expected = (gradient[image] * (moved - x[image])).sum()
                torch.testing.assert_close(found[image, row, column], expected)


@pytest.mark.parametrize("probabilities", [True, False])
def test_half_the_expected_square_of_a_reading_is_the_divergence(probabilities: bool) -> None:
    torch.manual_seed(0)
    output, change = torch.randn(1, 5, dtype=torch.float64), 0.02 * torch.randn(1, 5, dtype=torch.float64)
    found = readings(output.float().requires_grad_(), 4000, probabilities)
    point = output.float().requires_grad_()
    torch.manual_seed(1)
    slopes = torch.autograd.functional.jacobian(lambda at: readings_again(at, probabilities), point)[:, 0]
    assert found.shape == (4000,)
    expected = (slopes.double() @ change[0]).square().mean() / 2
    if probabilities:
        log_p, log_q = output.log_softmax(dim=1), (output + change).log_softmax(dim=1)
        divergence = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    else:
        divergence = 1 - F.cosine_similarity(output, output + change).sum()
    assert expected.item() == pytest.approx(divergence.item(), rel=0.15)


def readings_again(output: torch.Tensor, probabilities: bool) -> torch.Tensor:
    torch.manual_seed(2)
    return readings(output, 4000, probabilities)


@pytest.mark.parametrize("name", ["deit", "mae", "dinov2_registers"])
def test_nothing_changes_for_the_host_and_half_of_the_blocks_are_offered(name: str) -> None:
    model, handle = hosts.patched(name, "dtem", 3, priced=True)
    handle.mode = "soft"
    for seed in range(4):
        torch.manual_seed(seed)
        with adapters.auxiliary() as said:
            output = model(hosts.images(name))
        learning = handle.host.learning
        torch.manual_seed(seed)
        draw = torch.randint(2, ((handle.host.depth + 1) // 2,)).tolist()
        offered = [layer for layer in range(learning) if draw[layer // 2] != layer % 2]
        assert len(said.offers) == len(offered)
        handle.mode = "hard"
        handle.r = [0 if layer in offered or layer >= learning else 6 for layer in range(handle.host.depth)]
        torch.testing.assert_close(output, model(hosts.images(name)), rtol=1e-5, atol=1e-5)
        handle.mode, handle.r = "soft", 3


def test_every_embedding_that_learns_gets_a_gradient_and_the_host_none() -> None:
    model, handle = hosts.patched("mae", "dtem", 3, priced=True)
    model.requires_grad_(False)
    handle.method.requires_grad_(True)
    handle.mode = "soft"
    for seed in range(6):
        torch.manual_seed(seed)
        with adapters.auxiliary() as said:
            output = model(hosts.images("mae"))
        ops.expected_cost(readings(output, 2), said.offers).backward()
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_a_step_down_the_price_makes_the_same_merges_cheaper() -> None:
    model, handle = hosts.patched("deit", "dtem", 5, priced=True, temperature=0.3)
    model.requires_grad_(False)
    handle.method.embeddings.requires_grad_(True)
    handle.mode = "soft"
    optimiser = torch.optim.SGD(handle.method.embeddings.parameters(), lr=5.0)
    costs = []
    for _ in range(12):
        torch.manual_seed(0)
        with adapters.auxiliary() as said:
            output = model(hosts.images("deit"))
        cost = ops.expected_cost(readings(output, 2), said.offers[:1])  # the first offer's tokens never change
        costs.append(cost.item())
        optimiser.zero_grad()
        cost.backward()
        optimiser.step()
    assert costs[-1] < 0.95 * costs[0], costs


def test_a_run_learns_by_it_and_goes_on_as_if_it_had_not_stopped(images: Path, tmp_path: Path) -> None:
    options = {"priced": True}
    whole = test_loop.settings(images, tmp_path / "whole", loss="distill", options=options, updates=4, save_every=2)
    ends = test_loop.state(train(test_loop.model(), whole, test_loop.CONFIG).handle.method)
    start = test_loop.state(dtem.patch(test_loop.model(), "dtem", priced=True).method)
    assert any(not torch.equal(ends[name], start[name]) for name in ends)
    again = test_loop.settings(images, tmp_path / "again", loss="distill", options=options, updates=4, save_every=2)
    run = Run(test_loop.model(), again, test_loop.CONFIG, restart=False)
    step = run._step

    def stop_at_two(passes: list[Any]) -> dict[str, float]:
        if run.update == 2:
            raise KeyboardInterrupt
        return step(passes)

    run._step = stop_at_two
    with pytest.raises(KeyboardInterrupt):
        run.go()
    resumed = test_loop.state(train(test_loop.model(), again, test_loop.CONFIG).handle.method)
    for name, part in ends.items():
        assert torch.equal(part, resumed[name]), name


def test_what_it_does_not_go_with_is_refused(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DtemError, match="choose one"):
        dtem.patch(hosts.fresh("deit"), priced=True, sparse=True)
    with pytest.raises(DtemError, match="cannot learn rates"):
        dtem.patch(hosts.fresh("deit"), priced=True, learn_rates=True)
    with pytest.raises(DtemError, match="priced = 1"):
        dtem.patch(hosts.fresh("deit"), priced=1)
    for changes in ({"loss": "task"}, {"loss": "distill", "checkpointing": True}):
        with pytest.raises(DtemError, match="option priced goes with"):
            test_loop.settings(images, tmp_path, options={"priced": True}, **changes)
