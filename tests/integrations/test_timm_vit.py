"""timm's ViTs: right answers."""

import copy

import pytest
import torch
from torch import nn

import dtem
from contract.hosts import CLASSIFYING, HOSTS, ask, every, fresh, gradients, images, patched
from dtem import ops
from integrations import reference


@pytest.mark.parametrize(
    "name", ["deit", "distilled", "deit3", "mae", "dinov2_registers", "qk_norm", "scale_norms", "lvvit"]
)
@pytest.mark.parametrize("r", [5, 13, [20, 0, 9, 3]], ids=str)
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


@pytest.mark.parametrize(
    ("name", "dim"),
    # qk_norm: k_norm stands between W_k and the keys; segmenter: it starts from a projection that is nearly ToMe
    [(name, None) for name in HOSTS if name not in ("qk_norm", "segmenter")]
    + [(name, dim) for name in ("distilled", "mae", "no_qkv_bias") for dim in (32, 48)],
)
def test_untrained_dtem_is_tome(name, dim):
    tome, trained = patched(name, "tome")[1], patched(name, "dtem", dim=dim)[1]
    x = images(name, batch=4)
    with torch.no_grad(), tome.trace() as expected:
        wanted = ask(tome.model, x)
    with torch.no_grad(), trained.trace() as got:
        output = ask(trained.model, x)
    assert all(map(torch.equal, got.sources, expected.sources))
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_a_random_embedding_is_not_tome():
    tome, random = patched("deit", "tome")[1], patched("deit", "dtem", init="random")[1]
    x = images("deit")
    with torch.no_grad(), tome.trace() as keys, random.trace() as own:
        tome.model(x)
        random.model(x)
    assert len(keys.sources) == len(own.sources) == 4
    assert not torch.equal(keys.sources[3], own.sources[3])


def test_hidden_layers_merge_and_learn():
    model, handle = patched("deit", "dtem", init="random", hidden=(24, 12), dim=8)
    with torch.no_grad():
        assert model.forward_features(images("deit")).shape[1] == handle.tokens[-1]
    handle.mode = "soft"
    _, grads = gradients(model, images("deit"))
    first = handle.method.embeddings[0]
    assert [layer.out_features for layer in first if isinstance(layer, nn.Linear)] == [24, 12, 8]
    assert all(parameter.grad.abs().max() > 0 for parameter in first.parameters())
    assert grads["blocks.0.attn.qkv.weight"].abs().max() > 0


def test_the_embedding_does_not_teach_the_host():
    """Its input is detached: the host learns through the tokens only."""
    model, handle = patched("mae", "dtem")
    handle.mode = "soft"
    seen = []
    for embedding in handle.method.embeddings:
        embedding.register_forward_hook(
            lambda module, args, out: seen.append((args[0].requires_grad, out.requires_grad))
        )
    gradients(model, images("mae"))
    assert seen == [(False, True)] * 4


@every(["mae", "no_class_token", "mean_with_prefix"], whole=True)
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
        if not handle.method.restores:
            assert not torch.allclose(model(x), plain, atol=1e-3), "a plain mean is something else"


@every(["siglip"], whole=True)
def test_attention_pooling_counts_every_patch_once(name, method):
    model, handle = patched(name, method)
    x = images(name)
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        plain = model.head(model.attn_pool(features))
        if not handle.method.proportional:  # then a token counts once in every attention
            torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-5)
            return
        expected = model.head(model.attn_pool(ops.unmerge(features, trace.sources[-1])))
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(x), plain, atol=1e-3)


@every(["max", "avgmax"], whole=True)
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


@pytest.mark.parametrize("method", CLASSIFYING)
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
