"""timm's ViTs: right answers, right refusals."""

import copy

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

import dtem
from adapters import reference
from contract.hosts import HOSTS, R, fresh, gradients, images, lively, patched, vit
from dtem import ops
from dtem.methods import METHODS

# --- right answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deit", "distilled", "deit3", "mae", "dinov2_registers", "qk_norm", "scale_norms"])
@pytest.mark.parametrize("r", [0, 5, 13, [20, 0, 9, 3]], ids=str)
def test_tome_is_tome_written_out(name, r):
    model, handle = patched(name, "tome", r)
    image = images(name, batch=1)
    with torch.no_grad():
        expected = reference.logits(fresh(name), image[0], list(handle.plan))
        torch.testing.assert_close(model(image)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_tome_without_proportional_attention(name):
    model, handle = patched(name, "tome", 13, proportional=False)
    image = images(name, batch=1)
    with torch.no_grad():
        expected = reference.logits(fresh(name), image[0], list(handle.plan), proportional=False)
        torch.testing.assert_close(model(image)[0], expected, rtol=1e-5, atol=1e-5)
        handle.unpatch()
        dtem.patch(model, "tome", 13)
        assert not torch.allclose(model(image)[0], expected, atol=1e-3), "the switch must matter"


def test_proportional_in_training_only():
    on, off = patched("mae", "dtem")[1], patched("mae", "dtem", proportional=False)[1]
    train = patched("mae", "dtem", proportional="train")[1]
    x = images("mae")
    with torch.no_grad():
        assert torch.equal(train.model(x), off.model(x))
        assert not torch.allclose(on.model(x), off.model(x), atol=1e-3)
        for handle in (on, train):
            handle.mode = "soft"
        assert torch.equal(train.model(x), on.model(x))


@pytest.mark.parametrize("name", [name for name in HOSTS if name != "qk_norm"])  # there k-norm is between W_k and k
@pytest.mark.parametrize("dim", [None, 32, 48])
def test_untrained_dtem_is_tome(name, dim):
    tome, trained = patched(name, "tome")[1], patched(name, "dtem", dim=dim)[1]
    x = images(name, batch=4)
    with torch.no_grad(), tome.trace() as expected:
        wanted = tome.model(x)
    with torch.no_grad(), trained.trace() as got:
        output = trained.model(x)
    assert all(map(torch.equal, got.sources, expected.sources))
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_a_random_embedding_is_not_tome():
    tome, random = patched("deit", "tome")[1], patched("deit", "dtem", init="random")[1]
    x = images("deit")
    with torch.no_grad(), tome.trace() as keys, random.trace() as own:
        tome.model(x)
        random.model(x)
    assert not torch.equal(own.sources[3], own.sources[7])
    assert keys.sources == []


def test_hidden_layers_merge_and_learn():
    model, handle = patched("deit", "dtem", init="random", hidden=(24, 12), dim=8)
    with torch.no_grad():
        assert model.forward_features(images("deit")).shape[1] == handle.tokens[-1]
    handle.mode = "soft"
    _, grads = gradients(model, images("deit"))
    first = handle.method.embeddings[0]
    assert [tuple(layer.weight.shape) for layer in first if isinstance(layer, nn.Linear)] == [
        (24, 32),
        (12, 24),
        (8, 12),
    ]
    assert all(parameter.grad.abs().max() > 0 for parameter in first.parameters())
    assert grads["blocks.0.attn.qkv.weight"].abs().max() > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mae", "no_class_token", "mean_with_prefix"])
def test_mean_pooling_counts_every_patch_once(name, method):
    model, handle = patched(name, method)
    x = images(name)
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        unmerged = ops.unmerge(features, trace.sources[-1])
        if model.pool_include_prefix:
            unmerged = torch.cat([features[:, : handle.host.prefix], unmerged], dim=1)
        expected = model.head(model.fc_norm(unmerged.mean(dim=1)))
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        plain = model.head(model.fc_norm(features[:, handle.host.prefix :].mean(dim=1)))
        assert not torch.allclose(model(x), plain, atol=1e-3), "a plain mean is something else"


@pytest.mark.parametrize("method", METHODS)
def test_attention_pooling_counts_every_patch_once(method):
    model, handle = patched("siglip", method)
    x = images("siglip")
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        expected = model.head(model.attn_pool(ops.unmerge(features, trace.sources[-1])))
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(x), model.head(model.attn_pool(features)), atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["max", "avgmax"])
def test_other_pooling_is_that_of_the_full_grid(name, method):
    model, handle = patched(name, method)
    x = images(name)
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        patches = ops.unmerge(features, trace.sources[-1])
        pooled = patches.amax(dim=1) if name == "max" else 0.5 * (patches.amax(dim=1) + patches.mean(dim=1))
        torch.testing.assert_close(model(x), model.head(model.fc_norm(pooled)), rtol=1e-5, atol=1e-5)


def test_features_without_their_sizes_are_refused_where_sizes_count():
    model, _ = patched("mae", "tome")
    with torch.no_grad():
        features = model.forward_features(images("mae"))
        with pytest.raises(dtem.DtemError, match="no token sizes"):
            model.forward_head(features.clone())


def test_the_distilled_pair_in_training():
    model, _ = patched("distilled", "tome")
    model.set_distilled_training(True)
    model.train()
    pair = model(images("distilled"))
    assert len(pair) == 2
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images("distilled")), (pair[0] + pair[1]) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_new_classifier_on_a_patched_model(method):
    model, _ = patched("deit", method)
    model.reset_classifier(7)
    with torch.no_grad():
        assert model(images("deit")).shape == (2, 7)


def test_a_new_pooling_on_a_patched_model():
    model, handle = patched("deit", "tome")
    model.reset_classifier(7, "avg")
    x = images("deit")
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
        expected = model.head(ops.unmerge(features, trace.sources[-1]).mean(dim=1))
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_fused_attention_off():
    """timm can be told to build attention by hand; merging takes the fused kernel either way."""
    host = fresh("deit")
    for block in host.blocks:
        block.attn.fused_attn = False
    model = copy.deepcopy(host)
    handle = dtem.patch(model, "tome", 0)
    x = images("deit")
    with torch.no_grad():
        assert torch.equal(model(x), host(x))
        handle.r = 5
        other, _ = patched("deit", "tome", 5)
        torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-5)


# --- image sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_dynamic_image_sizes(method):
    name = "dinov2_registers"
    model, handle = patched(name, method)
    for height, width in ((32, 32), (48, 32), (20, 56), (8, 12)):
        x = torch.randn(2, 3, height, width)
        patches = height * width // 16
        plan = dtem.schedule.clamp([R] * 4, patches)
        with torch.no_grad(), handle.trace() as trace:
            features = model.forward_features(x)
        assert features.shape[1] == 5 + patches - sum(plan)
        assert trace.sources[-1].shape == (2, patches)
        assert torch.equal(trace.sizes[-1].sum(dim=1), torch.full((2,), 5.0 + patches))
        with torch.no_grad():
            grid = model.forward_intermediates(x, intermediates_only=True)[-1]
            assert grid.shape == (2, 32, height // 4, width // 4)
            handle.r = 0
            assert torch.equal(model(x), fresh(name)(x))
            handle.r = R


def test_padded_image_sizes():
    model = lively(vit(dynamic_img_size=True, dynamic_img_pad=True)()).eval()
    dtem.patch(model, "tome", 5)
    with torch.no_grad():
        assert model.forward_features(torch.randn(1, 3, 30, 33)).shape[1] == 1 + 8 * 9 - 20


@pytest.mark.parametrize("r", [0, R])
def test_a_wrong_image_size_is_refused_with_both_sizes(r):
    model, _ = patched("non_square", "dtem", r)
    for door in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(dtem.DtemError, match=r"40×48.*32×48"), torch.no_grad():
            door(torch.randn(2, 3, 40, 48))


@pytest.mark.parametrize("r", [0, R])
def test_wrong_channels_are_refused_with_both_numbers(r):
    model, _ = patched("deit", "dtem", r)
    with pytest.raises(dtem.DtemError, match=r"3.*\(2, 1, 32, 32\)"), torch.no_grad():
        model(torch.randn(2, 1, 32, 32))
    with pytest.raises(dtem.DtemError, match=r"\(3, 32, 32\)"), torch.no_grad():
        model(torch.randn(3, 32, 32))


@pytest.mark.parametrize("r", [0, R])
def test_an_image_that_patches_do_not_fill_is_refused(r):
    model, _ = patched("dinov2_registers", "dtem", r)
    with pytest.raises(dtem.DtemError, match="33"), torch.no_grad():
        model(torch.randn(2, 3, 33, 32))


@pytest.mark.parametrize("door", ["forward", "forward_features", "forward_intermediates"])
def test_an_attention_mask_while_merging_is_refused(door):
    model, handle = patched("deit", "dtem")
    x, mask = images("deit"), torch.zeros(65, 65)
    with torch.no_grad():
        with pytest.raises(dtem.DtemError, match="attn_mask"):
            getattr(model, door)(x, attn_mask=mask)
        with pytest.raises(dtem.DtemError, match="is_causal"):
            getattr(model, door)(x, is_causal=True)
        handle.r = 0
        mask[:, 5:] = -torch.inf
        assert torch.equal(model(x, attn_mask=mask), fresh("deit")(x, attn_mask=mask))
        assert not torch.equal(model(x, attn_mask=mask), model(x))


def test_intermediate_grids_in_soft_mode_are_refused():
    model, handle = patched("deit", "dtem")
    handle.mode = "soft"
    with pytest.raises(dtem.DtemError, match="hard"):
        model.forward_intermediates(images("deit"))


# --- refusals --------------------------------------------------------------------------------------------------------


class Reversed(VisionTransformer):
    """A host that does something else between its blocks."""

    def forward_features(self, x, **kwargs):
        return super().forward_features(x, **kwargs).flip(1)


def small(cls, **settings):
    return cls(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5, **settings)


FOREIGN = {
    "ResNet": lambda: timm.create_model("resnet18"),
    "SwinTransformer": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=12, depths=(1, 1), num_heads=(2, 2), num_classes=5
    ),
    "Eva": lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28, embed_dim=24, depth=1, num_heads=2),
    "ParallelScalingBlock": lambda: small(VisionTransformer, block_fn=ParallelScalingBlock),
    "ResPostBlock": lambda: small(VisionTransformer, block_fn=ResPostBlock),
    "Reversed": lambda: small(Reversed),
    "Linear": lambda: nn.Linear(3, 3),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_unsupported_model_is_refused_by_name_with_those_that_are_supported(kind):
    model = FOREIGN[kind]()
    before = type(model)
    with pytest.raises(dtem.DtemError, match="not supported") as error:
        dtem.patch(model, "tome", 1)
    assert kind in str(error.value)
    for family in ("VisionTransformer", "deit", "MAE", "DINOv2"):
        assert family in str(error.value)
    assert type(model) is before


def test_one_odd_block_is_found():
    model = fresh("deit")
    model.blocks[2] = FOREIGN["ResPostBlock"]().blocks[0]
    with pytest.raises(dtem.DtemError, match="block 2 is a ResPostBlock"):
        dtem.patch(model, "tome", 1)


def test_a_changed_block_is_refused():
    """A block whose forward someone else replaced would silently lose that change."""
    model = fresh("deit")

    class Doubled(type(model.blocks[0])):
        def forward(self, x, **kwargs):
            return 2 * super().forward(x, **kwargs)

    model.blocks[1].__class__ = Doubled
    with pytest.raises(dtem.DtemError, match="block 1 is a Doubled"):
        dtem.patch(model, "tome", 1)


def test_a_pooling_that_cannot_weigh_tokens_is_refused():
    try:
        model = small(VisionTransformer, global_pool="prr")
    except AssertionError:
        pytest.skip("this timm has no 'prr' pooling")
    with pytest.raises(dtem.DtemError, match="prr"):
        dtem.patch(model, "tome", 1)


@pytest.mark.parametrize("thing", ["deit_small_patch16_224", None, 3])
def test_what_is_no_model_is_refused_by_value(thing):
    with pytest.raises(dtem.DtemError, match=f"{thing!r}.*{type(thing).__name__}.*not a model"):
        dtem.patch(thing, "tome", 1)


# --- weights, hooks, precision ---------------------------------------------------------------------------------------


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


def test_weights_loaded_after_patching_are_used():
    """Nothing of the host's weights is kept aside: whatever computes q, k, v sees the new ones."""
    model, _ = patched("deit", "dtem")
    x = images("deit")
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            parameter.mul_(1.1)
        twin = copy.deepcopy(fresh("deit"))
        dtem.patch(twin, "dtem", R)
        twin.load_state_dict(model.state_dict())
        after = model(x)
        assert not torch.allclose(after, before, atol=1e-3)
        torch.testing.assert_close(twin(x), after, rtol=1e-6, atol=1e-6)
        model.load_state_dict({key: value / 1.1 for key, value in model.state_dict().items()})
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("method", METHODS)
def test_hooks_fire_and_see_what_stays(method, grad):
    """Every submodule that merging passes through answers to hooks, and its output is not written over later."""
    model, _ = patched("scale_norms", method)
    watched = [
        "norm1",
        "attn.qkv",
        "attn.norm",
        "attn.proj",
        "norm2",
        "mlp",
        "mlp.fc1",
        "mlp.act",
        "mlp.norm",
        "mlp.fc2",
    ]
    seen = {}
    for name in watched:
        for layer, block in enumerate(model.blocks):
            key = f"blocks.{layer}.{name}"
            hook = lambda module, args, out, key=key: seen.setdefault(key, (out, out.detach().clone()))  # noqa: E731
            block.get_submodule(name).register_forward_hook(hook)
    plain, _ = patched("scale_norms", method)
    with torch.set_grad_enabled(grad):
        out = model(images("scale_norms"))
        torch.testing.assert_close(out, plain(images("scale_norms")), rtol=1e-5, atol=1e-5)
    assert set(seen) == {f"blocks.{layer}.{name}" for layer in range(4) for name in watched}
    changed = [key for key, (kept, copied) in seen.items() if not torch.equal(kept, copied)]
    assert changed == [], "a hook's tensor was overwritten after the hook saw it"


@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["deit", "mae", "siglip", "qk_norm", "dinov2_registers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision(name, method, dtype):
    model, handle = patched(name, method)
    exact = fresh(name)
    dtem.patch(exact, method, R)
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


@pytest.mark.parametrize("method", METHODS)
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
