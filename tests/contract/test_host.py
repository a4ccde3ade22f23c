"""What patching does to the host: nothing at r = 0, nothing after unpatching."""

import pytest
import torch

import dtem
from contract.hosts import (
    FEW,
    HOSTS,
    R,
    alike,
    ask,
    every,
    form,
    fresh,
    gradients,
    images,
    pairs,
    patch,
    patched,
    provided,
)
from dtem import integrations

pytestmark = pytest.mark.contract


@every()
def test_nothing_to_merge_is_bit_identical(name, method):
    host, x = fresh(name), images(name)
    model, handle = patched(name, method)
    with torch.no_grad():
        assert not torch.equal(ask(model, x), ask(host, x)), "merging must change something, or this shows nothing"
        handle.r = 0
        assert torch.equal(ask(model, x), ask(host, x))
        if HOSTS[name].doors:
            assert torch.equal(model.forward_features(x), host.forward_features(x))
    for each in (host, model):
        each.train()
    expected, expected_grads = gradients(host, x)
    got, grads = gradients(model, x)
    assert torch.equal(got, expected)
    for key, gradient in expected_grads.items():
        assert alike(grads[key], gradient), key


@every(soft=True)
def test_soft_mode_changes_nothing_without_merging(name, method):
    host, x = fresh(name).train(), images(name)
    model, handle = patched(name, method, r=0)
    model.train()
    handle.mode = "soft"
    expected, expected_grads = gradients(host, x)
    got, grads = gradients(model, x)
    assert torch.equal(got, expected)
    assert all(alike(grads[key], gradient) for key, gradient in expected_grads.items())


@every()
def test_unpatch_restores_class_keys_and_output(name, method):
    host, x = fresh(name), images(name)
    model, handle = patched(name, method)
    assert type(model) is not type(host)
    own = {key for key in model.state_dict() if not key.startswith("dtem.")}
    assert own == set(host.state_dict()), "a patched host keeps its keys"
    with torch.no_grad():
        ask(model, x)
    if HOSTS[name].soft and handle.method.has_soft_mode():
        handle.mode = "soft"
        gradients(model, x)
    assert handle.unpatch() is model
    assert type(model) is type(host)
    assert list(model.state_dict()) == list(host.state_dict())
    assert vars(model).keys() == vars(host).keys()
    assert [type(module) for module in model.modules()] == [type(module) for module in host.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(ask(model, x), ask(host, x))
        if HOSTS[name].doors:
            assert torch.equal(model.forward_features(x), host.forward_features(x))
    again = patch(model, method, R)
    assert again.r == R


@every()
def test_patching_twice_is_refused(name, method):
    model, handle = patched(name, method)
    kind = type(model)
    with pytest.raises(dtem.DtemError, match="patched already"):
        patch(model, method, r=1)
    assert type(model) is kind
    assert handle.r == R


@every(FEW)
def test_r_can_be_set_at_any_time(name, method):
    model, handle = patched(name, method, r=0)
    x = images(name)
    for r in (R, 0, 3, [5, 0, 2, 1], 0.25, "4@-0.5", R):
        handle.r = r
        _, other = patched(name, method, r=r)
        assert handle.plan == other.plan
        with torch.no_grad():
            assert torch.equal(model(x), other.model(x))
            assert model.forward_features(x).shape[1] == handle.tokens[-1]


@every()
def test_a_method_that_needs_more_than_the_host_provides_is_refused(name, method, monkeypatch):
    model = fresh(name)
    family = integrations.find(model).family
    cls = form(name, method)
    monkeypatch.setattr(cls, "needs", frozenset({"input", "moonlight"}))
    _refused(model, method, f"{cls.name}.*moonlight.*{family}")


@pytest.mark.parametrize(("name", "method"), pairs(fitting=False))
def test_a_method_and_a_host_that_do_not_go_together(name, method):
    cls = form(name, method)
    lacking = cls.needs - provided(name)
    assert lacking
    _refused(fresh(name), method, ".*".join([cls.name, *sorted(lacking), integrations.find(fresh(name)).family]))


def _refused(model, method, said):
    before = type(model)
    with pytest.raises(dtem.DtemError, match=said) as error:
        patch(model, method)
    assert "input" not in str(error.value), "only what is missing is named"
    assert type(model) is before
    assert not hasattr(model, "dtem")
