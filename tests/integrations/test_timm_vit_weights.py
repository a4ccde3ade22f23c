"""timm's ViTs: weights, hooks and number formats."""

import copy

import pytest
import safetensors.torch
import torch

import dtem
from contract.hosts import CLASSIFYING, R, every, fresh, gradients, images, lively, patch, patched, vit


def mae_keys(depth):
    """Names in the official fine-tuned MAE checkpoints: fc_norm, and no final norm."""
    block = [
        f"{part}.{kind}"
        for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    outside = ["patch_embed.proj", "fc_norm", "head"]
    return {
        "cls_token",
        "pos_embed",
        *(f"{part}.{kind}" for part in outside for kind in ("weight", "bias")),
        *(f"blocks.{layer}.{part}" for layer in range(depth) for part in block),
    }


@pytest.mark.parametrize("patch_first", [False, True])
def test_official_mae_weights_load(patch_first):
    donor = fresh("mae").state_dict()
    checkpoint = {key: donor[key].clone() for key in mae_keys(4)}
    model = vit(global_pool="avg")().eval()
    if patch_first:
        dtem.patch(model, "tome", R)
    model.load_state_dict(checkpoint, strict=True)
    if not patch_first:
        dtem.patch(model, "tome", R)
    x = images("mae")
    with torch.no_grad():
        assert torch.equal(model(x), patched("mae", "tome")[0](x))


def everything():
    """A host with every optional part, so that each of them can be watched."""
    return lively(
        vit(scale_attn_norm=True, scale_mlp_norm=True, init_values=0.5, qk_norm=True, drop_path_rate=0.1)()
    ).eval()


WATCHED = [
    *("norm1", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.norm", "attn.proj", "ls1", "drop_path1"),
    *("norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.norm", "mlp.fc2", "ls2", "drop_path2"),
]
LAST_OF_A_PLAIN_HOST = ["attn.proj", "mlp.fc2", "mlp"]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("method", CLASSIFYING)
@pytest.mark.parametrize(
    ("build", "names"), [(everything, WATCHED), (vit(), LAST_OF_A_PLAIN_HOST)], ids=["every part", "plain"]
)
def test_a_hook_fires_and_what_it_sees_stays(build, names, method, grad):
    """Every submodule that merging passes through answers to hooks, and its output is not written over later."""
    model = build().eval()
    patch(model, method, R)
    x, seen = images("deit"), []

    def keep(module, args, out):
        seen.append((out, out.detach().clone()))

    with torch.set_grad_enabled(grad):
        expected = model(x)
        for name in names:
            seen.clear()
            # in the first block the rate of drop path is 0, so the second is watched
            hook = model.blocks[1].get_submodule(name).register_forward_hook(keep)
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
            hook.remove()
            assert len(seen) == 1, name
            shared, copied = seen[0]
            assert torch.equal(shared, copied), f"{name}: the tensor was overwritten after the hook saw it"


@pytest.mark.parametrize("method", CLASSIFYING)
def test_a_hook_may_replace_what_it_sees(method):
    model, _ = patched("deit", method)
    x = images("deit")
    with torch.no_grad():
        before = model(x)
        for name in ("attn.qkv", "attn.proj", "mlp.fc1"):
            hook = model.blocks[1].get_submodule(name).register_forward_hook(lambda module, args, out: out * 0.5)
            assert not torch.allclose(model(x), before, atol=1e-4), name
            hook.remove()
        assert torch.equal(model(x), before)


@every(["deit", "mae", "siglip", "qk_norm", "dinov2_registers"], whole=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(name, method, dtype):
    model, handle = patched(name, method)
    exact = fresh(name)
    patch(exact, method, R)
    x = images(name)
    model.to(dtype)
    with torch.no_grad(), handle.trace() as trace:
        out = model(x.to(dtype))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert torch.equal(trace.sizes[-1].sum(dim=1).float(), torch.full((2,), 64.0 + handle.host.prefix))
    with torch.no_grad():
        assert (out - exact(x)).abs().mean() < exact(x).abs().mean(), "half precision is rough, not nonsense"


@pytest.mark.parametrize("mode", ["hard", "soft"])
@pytest.mark.parametrize("name", ["deit", "mae", "siglip", "dinov2_registers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(name, mode, dtype):
    model, handle = patched(name, "dtem")
    handle.mode = mode
    with torch.autocast("cpu", dtype=dtype):
        out, grads = gradients(model, images(name))
    assert torch.isfinite(out).all()
    for key, gradient in grads.items():
        if gradient is not None:
            assert torch.isfinite(gradient).all(), key
    if mode == "soft":
        assert handle.method.embeddings[0][0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("method", CLASSIFYING)
def test_double_precision(method):
    model, _ = patched("deit", method)
    x = images("deit")
    with torch.no_grad():
        rough = model(x)
        exact = model.double()(x.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(rough.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_patched_model_moves_as_one():
    model, handle = patched("deit", "dtem")
    model.to(torch.bfloat16)
    assert {parameter.dtype for parameter in handle.method.parameters()} == {torch.bfloat16}
    half = fresh("deit").to(torch.bfloat16)
    assert {parameter.dtype for parameter in dtem.patch(half, r=R).method.parameters()} == {torch.bfloat16}
    assert torch.isfinite(half(images("deit").bfloat16())).all()


def storages(model):
    """Bytes of memory that the model's parameters stand in, each piece counted once."""
    pieces = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(pieces.values())


def test_patching_keeps_no_second_copy_of_weights():
    model, handle = patched("deit", "dtem")
    assert storages(model) == sum(parameter.nbytes for parameter in model.parameters())
    assert model.state_dict().keys() == fresh("deit").state_dict().keys()
    handle.unpatch()
    assert storages(model) == sum(parameter.nbytes for parameter in model.parameters())


CHANGES = {
    "in_place": lambda model, new: [p.copy_(new[key]) for key, p in model.named_parameters()],
    "data": lambda model, new: [setattr(p, "data", new[key].clone()) for key, p in model.named_parameters()],
    "load": lambda model, new: model.load_state_dict(new),
    "assign": lambda model, new: model.load_state_dict(new, assign=True),
    "functional": None,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["deit", "no_qkv_bias", "mae"])
def test_weights_changed_after_patching_are_used(name, change):
    """Whatever computes q, k, v and the embedding never uses old weights."""
    model, _ = patched(name, "dtem")
    torch.manual_seed(1)
    other = lively(fresh(name))
    handle = dtem.patch(other, "dtem", R, init="random", seed=3)
    new = {key: value.clone() for key, value in {**other.state_dict(), **handle.state_dict()}.items()}
    x = images(name)
    with torch.no_grad():
        before = model(x)
        if change == "functional":
            after = torch.func.functional_call(model, new, (x,))
            assert torch.equal(model(x), before)
        else:
            CHANGES[change](model, new)
            after = model(x)
        torch.testing.assert_close(after, other(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(after, before, atol=1e-3)


def test_an_optimiser_step_is_seen():
    model, handle = patched("deit", "dtem")
    handle.mode = "soft"
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        gradients(model, images("deit"))
        optimiser.step()
    handle.mode = "hard"
    twin, _ = patched("deit", "dtem")
    twin.load_state_dict(copy.deepcopy({**handle.state_dict(), **model.state_dict()}))
    x = images("deit")
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x).detach(), twin(x).detach(), rtol=1e-5, atol=1e-5)


def test_a_patched_model_saves_as_safetensors(tmp_path):
    """safetensors refuses tensors that overlap in memory; views that only lie side by side must pass."""
    model, _ = patched("deit", "dtem")
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    loaded = safetensors.torch.load_file(file)
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())
