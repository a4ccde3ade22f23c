"""An adapter's own norms and biases: used while tokens are merged, exactly as if they were the host's."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import dtem
from contract.hosts import FEW, HOSTS, LIBRARIES, TIMM, R, ask, described, fresh, gradients, images, patch

pytestmark = pytest.mark.contract

SAMPLE = ("distilled", "mae", *LIBRARIES)
ALL = pytest.mark.parametrize("name", HOSTS)


def tuned(name: str, method: str = "tome", r: object = R, **options: object) -> tuple[nn.Module, dtem.Handle]:
    """A patched host with norms and biases that have learned something."""
    model = fresh(name)
    handle = patch(model, method, r, norms=True, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in handle.method.affine.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model, handle


def overwritten(name: str, handle: dtem.Handle) -> nn.Module:
    """The oracle: a host whose own parameters are θ + f(r) Δ."""
    host = fresh(name)
    with torch.no_grad():
        for key, parameter in handle.method.affine.named_parameters():
            host.get_parameter(key).add_(parameter, alpha=handle.merger.merged_share)
    return host


@ALL
def test_merging_uses_them_as_if_they_were_the_hosts(name):
    model, handle = tuned(name, biases=name in FEW)
    expected = overwritten(name, handle)
    patch(expected, "tome", R)
    x = images(name)
    with torch.no_grad():
        got = ask(model, x)
        torch.testing.assert_close(got, ask(expected, x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(got, ask(overwritten(name, handle), x), atol=1e-3), "it merges"
        handle.unpatch()
        patch(model, "tome", R)
        assert not torch.allclose(got, ask(model, x), atol=1e-3), "the adapter's norms change something"


@ALL
def test_without_merging_the_host_is_bit_identical(name):
    model, handle = tuned(name, biases=True)
    handle.state_dict()  # stored: the host's state dict, which leaves it out, warns no more
    host, x = fresh(name), images(name)
    before = copy.deepcopy(host.state_dict())
    gradients(model, x)
    handle.r = 0
    with torch.no_grad():
        assert torch.equal(ask(model, x), ask(host, x))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(part, before[key]) for key, part in model.state_dict().items())
    handle.unpatch()
    assert [type(module) for module in model.modules()] == [type(module) for module in host.modules()]
    assert [vars(module).keys() for module in model.modules()] == [vars(module).keys() for module in host.modules()]
    with torch.no_grad():
        assert torch.equal(ask(model, x), ask(host, x))


@ALL
def test_untrained_they_change_nothing(name):
    model, plain = fresh(name), fresh(name)
    handle = patch(model, "tome", R, norms=True, biases=True)
    patch(plain, "tome", R)
    names = {key for key, _ in handle.method.affine.named_parameters()}
    assert names == set(described(name).norms) | set(described(name).biases)
    assert described(name).norms
    x = images(name)
    with torch.no_grad():
        torch.testing.assert_close(ask(model, x), ask(plain, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_hosts_own(name, checkpointing):
    model, handle = tuned(name, "dtem", biases=True)
    host = overwritten(name, handle)
    other = patch(host, "dtem", R)
    with torch.no_grad():
        for mine, theirs in zip(handle.method.embeddings.parameters(), other.method.parameters(), strict=True):
            theirs.copy_(mine)
    if checkpointing:
        model.set_grad_checkpointing(True)
        model.train()
        host.train()
    x = images(name)
    _, got = gradients(model, x)
    _, expected = gradients(host, x)
    for key, _ in handle.method.affine.named_parameters():
        mine, theirs = got[f"dtem.method.affine.{key}"], expected[key]
        if theirs is not None:
            torch.testing.assert_close(mine, theirs * handle.merger.merged_share, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SAMPLE)
def test_copies_and_pickles_have_norms_of_their_own(name):
    model, _ = tuned(name)
    x = images(name)
    with torch.no_grad():
        expected = ask(model, x)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(ask(copied, x), expected)
            for parameter in dtem.Handle(copied).method.affine.parameters():
                parameter.mul_(-1.0)
            assert torch.equal(ask(model, x), expected)
            assert not torch.allclose(ask(copied, x), expected, atol=1e-3)
            dtem.Handle(copied).unpatch()


@pytest.mark.parametrize("name", ["deit", "hf_vit"])
def test_threads_share_one_model(name):
    model, _ = tuned(name)
    x, outputs = images(name), []
    with torch.no_grad():
        expected = ask(model, x)

    def run():
        with torch.no_grad():
            outputs.extend(ask(model, x) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 15
    assert all(torch.equal(out, expected) for out in outputs)


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("method", ["tome", "dtem"])
def test_an_adapter_file_holds_them(name, method, tmp_path):
    model, handle = tuned(name, method, biases=True)
    handle.save_pretrained(tmp_path / "a.safetensors")
    x = images(name)
    loaded = fresh(name)
    again = dtem.from_pretrained(tmp_path / "a.safetensors", loaded)
    assert again.method.config.norms
    with torch.no_grad():
        assert torch.equal(ask(loaded, x), ask(model, x))


def test_a_file_can_be_used_in_part(tmp_path):
    _, handle = tuned("deit", "dtem")
    handle.save_pretrained(tmp_path / "a.safetensors")
    x = images("deit")
    loaded = fresh("deit")
    part = dtem.from_pretrained(tmp_path / "a.safetensors", loaded, norms=False)
    assert part.method.affine is None
    plain = fresh("deit")
    dtem.patch(plain, "dtem", R)
    with torch.no_grad():
        assert torch.equal(ask(loaded, x), ask(plain, x))
    _, handle = tuned("deit", "tome")
    handle.save_pretrained(tmp_path / "b.safetensors")
    with pytest.raises(dtem.DtemError, match="norms=False leaves nothing"):
        dtem.from_pretrained(tmp_path / "b.safetensors", fresh("deit"), norms=False)


def test_they_tend_to_the_host_as_r_falls():
    """θ(r) = θ + f(r) Δ, with f the share of patches that all blocks merge."""
    _, handle = tuned("deit")
    shares = []
    for r in (0, 1, 2, 4, 8):
        handle.r = r
        shares.append(handle.merger.merged_share)
        assert shares[-1] == sum(handle.plan) / handle.host.patches
    assert shares == sorted(shares)
    dense = tuned("segmenter", r="50%")[1]
    assert dense.merger.merged_share == pytest.approx(0.5)


def test_weights_that_are_loaded_later_are_followed():
    model, handle = tuned("deit")
    state = {key: part + 0.1 for key, part in fresh("deit").state_dict().items()}
    with pytest.warns(UserWarning, match="were trained"):
        model.load_state_dict(state)
    host = fresh("deit")
    host.load_state_dict(state)
    with torch.no_grad():
        for key, parameter in handle.method.affine.named_parameters():
            host.get_parameter(key).add_(parameter, alpha=handle.merger.merged_share)
        patch(host, "tome", R)
        torch.testing.assert_close(ask(model, images("deit")), ask(host, images("deit")), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TIMM[:2])
def test_lora_beside_them(name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, handle = tuned(name)
    expected = overwritten(name, handle)
    patch(expected, "tome", R)
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4, init_lora_weights=False)
    x = images(name)
    wrapped = []
    for each in (model, expected):
        torch.manual_seed(0)
        wrapped.append(peft.get_peft_model(each, config).eval())
    with torch.no_grad():
        torch.testing.assert_close(wrapped[0](x), wrapped[1](x), rtol=1e-5, atol=1e-5)


def test_half_precision_hosts_have_norms_in_their_precision():
    model, handle = tuned("deit")
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in handle.method.affine.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert ask(model, images("deit").to(torch.bfloat16)).dtype == torch.bfloat16


def test_a_host_without_known_norms_is_refused(monkeypatch):
    from dtem.integrations import timm_vit

    monkeypatch.setattr(timm_vit, "find_affine", lambda model, roots: ({}, {}))
    with pytest.raises(dtem.DtemError, match=r"norms = True, but dtem does not know the norms"):
        dtem.patch(fresh("deit"), "tome", R, norms=True)
    with pytest.raises(dtem.DtemError, match="norms = 1 must be True or False"):
        dtem.patch(fresh("deit"), "tome", R, norms=1)
