"""Rates learned beside the embedding: gradients by finite differences, costs by counting, whole numbers by trying."""

import copy
import itertools
import math
import random

import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, images, patched
from dtem import adapters, schedule
from dtem.measure import flops
from dtem.methods import rates

HOSTS = ["deit", "distilled", "mae", "augreg", "dinov2_registers"]
WEIGH = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
START = (9, 9, 9, 9)
MOVED = (2.3, -4.6, 1.4, 5.7)


def learning(name="deit", r=9, moved=None, method="dtem", **options):
    """A patched host whose rates start from r and have moved by so many tokens."""
    model, handle = patched(name, method, 0, learn_rates=True, **options)
    handle.aim(r)
    if moved is not None:
        with torch.no_grad():
            handle.method.rates.offset.copy_(torch.tensor(moved) / rates.TOKENS)
    return model, handle


def counted(handle, plan):
    handle.mode, handle.r = "hard", list(plan)
    return flops.count(handle.model, handle.host.image).macs / 1e9


@pytest.mark.parametrize("name", HOSTS)
def test_prices_cost_what_is_counted(name):
    _, handle = learning(name)
    dice = random.Random(0)
    for _ in range(6):
        wanted = [dice.choice([0, dice.randint(1, 40)]) for _ in range(4)]
        plan = schedule.clamp(wanted, handle.host.patches)
        priced = rates.gflops(handle.method.rates.prices.double(), torch.tensor(plan), handle.host)
        assert priced.item() == pytest.approx(counted(handle, plan), rel=1e-3)


def test_a_cost_that_is_no_sum_of_equal_blocks_is_refused():
    _, handle = learning()
    with pytest.raises(dtem.DtemError, match=r"no sum of equal blocks \(off by"):
        handle.method.aim(START, lambda plan: 1.0 - 0.1 * (plan[0] > 8) * plan[2] ** 0.3)


@pytest.mark.parametrize("method", ["dtem", "dtem_no_prop", "tome_gumbel"])
def test_before_training_it_is_the_constant_schedule(method):
    model, handle = learning(method=method)
    plain, other = patched("deit", method, 9)
    assert handle.r == "learned"
    assert handle.plan == START == other.plan
    x = images("deit")
    for mode in ("hard", "soft"):
        handle.mode = other.mode = mode
        handle.r = "learned"
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), [("deit", "dtem"), ("mae", "dtem"), ("mae", "tome_gumbel")])
def test_the_task_moves_rates_as_finite_differences_say(name, method, monkeypatch):
    """Between whole numbers, where which tokens are excluded does not change (`exclude` by size would depend on it).
    What has no gradient by design is held: embeddings, whose input is detached, and the clip, by mild temperatures."""
    model, handle = learning(name, moved=MOVED, method=method, temperature=1.0, scale=1.0)
    model.double()
    held, metric = {}, handle.method.metric
    monkeypatch.setattr(
        handle.method, "metric", lambda layer, taps: held.setdefault(layer, metric(layer, taps).detach())
    )
    handle.mode, handle.r = "soft", "learned"
    offset, x = handle.method.rates.offset, images(name, batch=1).double()

    def loss():
        return (model(x)[0] * WEIGH).sum()

    (gradient,) = torch.autograd.grad(loss(), offset)
    for layer in range(4):
        sides = []
        for step in (1e-7, -1e-7):
            with torch.no_grad():
                offset[layer] += step
                sides.append(loss().item())
                offset[layer] -= step
        expected = (sides[0] - sides[1]) / 2e-7
        assert gradient[layer].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert (gradient[:3] != 0).all()
    assert (gradient[3] != 0) == (name == "mae"), "what the last block merges never reaches the class token"


def test_rates_and_embeddings_get_a_gradient_at_the_start():
    """Rates are whole there: the step to come says what one more merge would do."""
    model, handle = learning()
    model.requires_grad_(False)
    handle.method.requires_grad_(True)
    handle.mode, handle.r = "soft", "learned"
    (model(images("deit")) * WEIGH.float()).sum().backward()
    assert (handle.method.rates.offset.grad[:3] != 0).all()
    assert handle.method.embeddings[0][0].weight.grad.any()


def test_the_flops_loss_is_what_is_counted():
    model, handle = learning(moved=MOVED, flops_weight=7.0)
    handle.mode, handle.r = "soft", "learned"
    with adapters.auxiliary() as losses:
        model(images("deit"))
    spent = counted(handle, START)
    now = handle.method.rates()
    torch.testing.assert_close(now, torch.tensor(START) + torch.tensor(MOVED))
    between = 0.0  # the counts of all whole plans around, each by how near it is
    for more in itertools.product((0, 1), repeat=4):
        near = [rate % 1 if up else 1 - rate % 1 for rate, up in zip(now.tolist(), more, strict=True)]
        between += math.prod(near) * counted(
            handle, [int(rate) + up for rate, up in zip(now.tolist(), more, strict=True)]
        )
    assert (losses["flops"].item() / 7.0) ** 0.5 == pytest.approx(abs(between / spent - 1), abs=3e-4)
    assert abs(between / spent - 1) > 5e-3


def test_without_an_aim_there_is_no_flops_loss():
    model, handle = patched("deit", "dtem", 9, learn_rates=True)
    handle.mode = "soft"
    with adapters.auxiliary() as losses:
        model(images("deit"))
    assert losses["flops"].item() == 0.0


def test_the_flops_loss_alone_leads_back_to_the_budget():
    _, handle = learning(moved=(6.0, 6.0, 6.0, 6.0))
    layer = handle.method.rates
    optimiser = torch.optim.Adam([layer.offset], lr=2e-3)
    assert layer.excess(layer()).item() < -0.1
    for _ in range(100):
        optimiser.zero_grad()
        layer.excess(layer()).square().backward()
        optimiser.step()
    assert abs(layer.excess(layer()).item()) < 0.01


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_whole_rates_meet_the_budget(name):
    """Counted: never above, at most 1 % below; and no block is far from its rate, give or take one shift for all."""
    _, handle = learning(name)
    layer, budget, dice = handle.method.rates, counted(handle, START), random.Random(1)
    for _ in range(12):
        with torch.no_grad():
            layer.offset.copy_(torch.tensor([dice.uniform(-8, 8) / rates.TOKENS for _ in range(4)]))
        handle.mode, handle.r = "hard", "learned"
        plan, left = handle.plan, handle.host.patches
        assert -0.01 <= counted(handle, plan) / budget - 1 <= 1e-6
        for r in plan:
            assert 0 <= r <= left // 2
            left -= r
        away = [r - rate for r, rate in zip(plan, layer().tolist(), strict=True) if r]
        assert max(away) - min(away) < 2.01


def test_whole_rates_within_the_budget_stay():
    _, handle = learning("deit", [12, 3, 15, 6])
    assert handle.plan == (12, 3, 15, 6)
    handle.mode, handle.r = "soft", "learned"
    assert handle.plan == (12, 3, 15, 6)


def test_soft_steps_run_at_the_nearest_whole_numbers():
    _, handle = learning(moved=MOVED)
    handle.mode, handle.r = "soft", "learned"
    assert handle.plan == (11, 4, 10, 15)


def test_rates_stay_between_nothing_and_half():
    """Beyond a bound, a gradient is held back only if a step along it leads further out: a plain clamp would keep a
    rate there for good."""
    _, handle = learning(moved=(-30.0, 50.0, 0.4, 50.0))
    found, offset = handle.method.rates(), handle.method.rates.offset
    assert found.tolist() == pytest.approx([0.0, 32.0, 9.4, (64 - 32 - 9.4) / 2])

    def slopes(layer, sign):
        (gradient,) = torch.autograd.grad(sign * found[layer], offset, retain_graph=True)
        return (gradient / rates.TOKENS).tolist()

    assert slopes(0, 1.0) == [0.0, 0.0, 0.0, 0.0]
    assert slopes(0, -1.0) == [-1.0, 0.0, 0.0, 0.0]
    assert slopes(2, 1.0) == [0.0, 0.0, 1.0, 0.0]
    assert slopes(3, 1.0) == pytest.approx([-0.25, 0.0, -0.5, 1.0]), "its bound is half of what the others leave"
    assert slopes(3, -1.0) == pytest.approx([0.0, 0.5, 0.5, 0.0])


@pytest.mark.parametrize("shortcut", [False, True])
def test_checkpointing_keeps_gradients(shortcut):
    x, found = images("deit"), []
    for again in (False, True):
        model, handle = learning(moved=MOVED)
        handle.merger.shortcut = shortcut
        model.train()
        model.set_grad_checkpointing(again)
        handle.mode, handle.r = "soft", "learned"
        with adapters.auxiliary() as losses:
            out = model(x)
        (losses["flops"] + out.square().mean()).backward()
        found.append([losses["flops"].detach(), handle.method.rates.offset.grad])
        assert (found[-1][1] != 0).all()
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-7)


def test_half_precision_keeps_the_rates():
    model, handle = learning(moved=MOVED)
    expected = handle.method.schedule()
    model.to(torch.bfloat16)
    assert handle.method.rates.offset.dtype == torch.float32
    assert handle.method.embeddings[0][0].weight.dtype == torch.bfloat16
    assert handle.method.schedule() == expected
    handle.mode, handle.r = "soft", "learned"
    with adapters.auxiliary() as losses:
        out = model(images("deit").bfloat16())
    (out.float().square().mean() + losses["flops"]).backward()
    assert torch.isfinite(handle.method.rates.offset.grad).all()


def test_other_image_sizes_and_other_r():
    model, handle = learning("dinov2_registers", moved=MOVED)
    handle.mode = "soft"
    for r in ("learned", 3, [0, 20, 0, 1]):
        handle.r = r
        out = model(torch.randn(2, 3, 48, 40))
        (gradient,) = torch.autograd.grad(out.square().mean(), handle.method.rates.offset)
        assert torch.isfinite(gradient).all()
        assert gradient.any()


def test_learned_rates_are_saved(tmp_path):
    model, handle = learning(moved=MOVED)
    handle.r = "learned"
    dtem.save(handle, tmp_path / "one.safetensors", trained_r="0.01G")
    x = images("deit")
    for r in (None, "learned"):
        other = dtem.from_pretrained(tmp_path / "one.safetensors", fresh("deit"), r)
        assert other.plan == handle.plan != START
        with torch.no_grad():
            assert torch.equal(other.model(x), model(x))
    other = dtem.from_pretrained(tmp_path / "one.safetensors", fresh("deit"), 4)
    assert other.plan == (4, 4, 4, 4)
    assert copy.deepcopy(handle.model).dtem.method.schedule() == handle.plan


def test_an_adapter_without_rates_has_none(tmp_path):
    _, handle = patched("deit", "dtem", 5)
    dtem.save(handle, tmp_path / "one.safetensors")
    assert not [name for name in handle.method.state_dict() if "rates" in name]
    with pytest.raises(dtem.DtemError, match="'dtem' learns no schedule"):
        dtem.from_pretrained(tmp_path / "one.safetensors", fresh("deit"), "learned")


def test_what_cannot_be_aimed_at_is_refused():
    _, handle = patched("deit", "dtem", 0, learn_rates=True)
    whole = counted(handle, [0, 0, 0, 0])
    with pytest.raises(dtem.DtemError, match="cannot be met"):
        handle.aim(f"{whole / 10}G")
    with pytest.raises(dtem.DtemError, match="merges nothing"):
        handle.aim(f"{2 * whole}G")
    for method in ("tome", "dtem"):
        with pytest.raises(dtem.DtemError, match=f"'{method}' learns no rates.*learn_rates=True"):
            patched("deit", method)[1].aim(4)
    with pytest.raises(dtem.DtemError, match="without the shortcut"):
        patched("deit", "dtem", learn_rates=True, shortcut=True)[1].aim(4)
    with pytest.raises(dtem.DtemError, match="learn_rates = 'yes'"):
        patched("deit", "dtem", learn_rates="yes")
    with torch.device("meta"):
        empty = dtem.patch(timm.create_model("deit_tiny_patch16_224"), learn_rates=True)
    with pytest.raises(dtem.DtemError, match="without weights"):
        empty.r = "learned"


def test_diffrate_takes_aim_by_its_schedule():
    _, handle = patched("deit", "diffrate", 0)
    handle.aim(7)
    assert handle.plan == (7, 7, 7, 7)
