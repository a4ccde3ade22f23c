"""Soft merging on keys: ToMe when hard, DTEM's relaxation with the gradient in the host's keys when soft."""

import pytest
import torch

import dtem
from contract.hosts import HOSTS, ask, fresh, gradients, images, patched
from dtem import integrations, ops

NAMES = [name for name in HOSTS if integrations.find(fresh(name)).methods is None and name != "segmenter"]
SOFT = [name for name in NAMES if HOSTS[name].soft]


@pytest.mark.parametrize("name", NAMES)
def test_hard_is_tome(name):
    model, other = patched(name, "tome_soft")[0], patched(name, "tome")[0]
    x = images(name)
    with torch.no_grad():
        assert torch.equal(ask(model, x), ask(other, x))
        if hasattr(model, "forward_features"):
            assert torch.equal(model.forward_features(x), other.forward_features(x))


@pytest.mark.parametrize("name", [name for name in SOFT if name != "qk_norm"])  # there keys are more than a projection
def test_soft_is_untrained_dtem(name):
    handles = [patched(name, method)[1] for method in ("tome_soft", "dtem")]
    x = images(name).double()
    for handle in handles:
        handle.model.double()
        handle.mode = "soft"
    with torch.no_grad():
        torch.testing.assert_close(ask(handles[0].model, x), ask(handles[1].model, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["deit", "mae", "qk_norm"])
def test_the_gradient_reaches_the_keys(name, monkeypatch):
    """Every block but a class-token model's last one learns what to merge; cutting the metric off changes that."""
    model, handle = patched(name, "tome_soft", r=6)
    handle.mode = "soft"
    x = images(name)
    _, through = gradients(model, x)
    cosine = ops.cosine
    monkeypatch.setattr(ops, "cosine", lambda z, *rest: cosine(z.detach(), *rest))
    _, cut = gradients(model, x)
    last = len(model.blocks) - 1
    for layer in range(len(model.blocks)):
        key = f"blocks.{layer}.attn.qkv.weight"
        assert torch.isfinite(through[key]).all()
        change = (through[key] - cut[key])[32:64].abs().max() / through[key].abs().max()
        if layer == last and handle.host.pooling == "prefix":
            assert change < 1e-5, key
        else:
            assert change > 1e-3, key


def test_gradients_are_slopes():
    """Warm enough that no row of the soft adjacency is clipped: the clip has no gradient, by design."""
    model, handle = patched("mae", "tome_soft", r=3, temperature=1.0, scale=1.0)
    model.double()
    handle.mode = "soft"
    x = images("mae").double()
    _, grads = gradients(model, x)
    for layer in (0, 3):
        weight = model.blocks[layer].attn.qkv.weight
        direction = torch.zeros_like(weight)
        direction[32:64] = torch.randn(32, 32, dtype=torch.float64)  # of the keys
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                out = model(x)
                ends.append((out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().item())
                weight.add_(direction, alpha=-step)
        slope = (ends[0] - ends[1]) / 2e-6
        expected = (grads[f"blocks.{layer}.attn.qkv.weight"] * direction).sum().item()
        assert abs(expected) > 1e-4
        assert slope == pytest.approx(expected, rel=1e-4)


def test_nothing_of_its_own():
    _, handle = patched("deit", "tome_soft")
    assert not list(handle.method.parameters())
    assert not handle.method.state_dict()
    assert handle.method.has_soft_mode()


@pytest.mark.parametrize(
    "option", [{"temperature": 0.0}, {"scale": -1.0}, {"candidates": 0}, {"exclude": "all"}], ids=str
)
def test_a_bad_option_is_refused_by_value(option):
    name, value = next(iter(option.items()))
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        dtem.patch(fresh("deit"), "tome_soft", 4, **option)
