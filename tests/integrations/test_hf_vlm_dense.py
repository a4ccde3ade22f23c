"""Vision-language models that arrange the tokens of their tower by places: merged in each component, and unmerged."""

import copy
import functools
import pickle

import pytest
import torch

import dtem

transformers = pytest.importorskip("transformers")

from dtem.measure.flops import count  # noqa: E402
from integrations.vlms import tiny_grid_vlm, xfail_where_the_host_disagrees  # noqa: E402

pytestmark = pytest.mark.contract
KINDS = ("Idefics3", "SmolVLM", "Gemma3", "LlavaNext", "LlavaOnevision")
NEW = {"max_new_tokens": 3, "do_sample": False}


@functools.cache
def host(kind):
    return tiny_grid_vlm(kind)


def by_hand(layer, method, index, x, r):
    """Two components of a layer on tokens that are merged by matching and copied back."""
    for component, (norm, run) in enumerate(((layer.layer_norm1, layer.self_attn), (layer.layer_norm2, layer.mlp))):
        grouped = method.group(2 * index + component, norm(x), r)
        if component == 0:
            bias = method.bias_of(grouped)
            attn = layer.self_attn
            q, k, v = (
                each(grouped.x).unflatten(-1, (2, 16)).transpose(1, 2)
                for each in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            scores = q @ k.mT * attn.scale + (0 if bias is None else bias[:, None, None])
            y = attn.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        else:
            y = run(grouped.x)
        x = x + y.gather(1, grouped.matching.source[..., None].expand(-1, -1, y.shape[2]))
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_model_reads_as_many_tokens_of_a_tower_that_computes_less(kind):
    original, inputs = host(kind)
    model = copy.deepcopy(original)
    handle = dtem.patch(model, r=0)
    expected = original(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    answer = original.generate(**inputs, **NEW)
    assert torch.equal(model.generate(**inputs, **NEW), answer)
    handle.r = "40%"
    assert handle.tokens == (64 + handle.host.prefix,) * handle.host.depth
    merged = model(**inputs)
    assert merged.logits.shape == expected.shape
    assert not torch.allclose(merged.logits, expected)
    for beams in (1, 2):
        cached = model.generate(**inputs, **NEW, num_beams=beams)
        again = model.generate(**inputs, **NEW, num_beams=beams, use_cache=False)
        if beams > 1 and not torch.equal(cached, again):
            xfail_where_the_host_disagrees(original, inputs, NEW | {"num_beams": beams})
        assert torch.equal(cached, again)
    assert flops(model) < 0.8 * flops(original)
    handle.unpatch()
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert torch.equal(model(**inputs).logits, expected)


def flops(model):
    return count(model, (3, 32, 32)).macs


@pytest.mark.parametrize("kind", ["SmolVLM", "LlavaNext"])
@pytest.mark.parametrize("method", ["dtem", "tome"])
def test_a_tower_computes_what_its_layers_do_by_hand(kind, method):
    model = copy.deepcopy(host(kind)[0])
    handle = dtem.patch(model, method, r="40%")
    tower = getattr(model.model, "vision_tower", None) or model.model.vision_model
    x = torch.randn(2, 64 + handle.host.prefix, 32)
    layers = list(tower.encoder.layers._modules.values())[: handle.host.depth]
    assert handle.host.depth == (3 if kind == "LlavaNext" else 4)
    with torch.no_grad():
        ours, theirs = tower.encoder(inputs_embeds=x).last_hidden_state, x
        for index, (layer, r) in enumerate(zip(layers, handle.plan, strict=True)):
            assert r > 0
            theirs = by_hand(layer, handle.method, index, theirs, r)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Idefics3", "Gemma3"])
def test_soft_mode_trains_every_embedding(kind):
    model, inputs = copy.deepcopy(host(kind)[0]), host(kind)[1]
    model.requires_grad_(False)
    handle = dtem.patch(model, r="40%", relaxed=8)
    handle.method.requires_grad_(True)
    handle.mode = "soft"
    model(**inputs).logits.logsumexp(-1).sum().backward()
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_equal(copied):
    model, inputs = copy.deepcopy(host("SmolVLM")[0]), host("SmolVLM")[1]
    dtem.patch(model, r="40%")
    assert torch.equal(copied(model)(**inputs).logits, model(**inputs).logits)


def test_what_it_cannot_do_is_refused():
    model, inputs = copy.deepcopy(host("SmolVLM")[0]), host("SmolVLM")[1]
    with pytest.raises(dtem.DtemError, match="prediction"):
        dtem.patch(model, "evit")
    dtem.patch(model, r="40%")
    padded = torch.ones(2, 3, 32, 32, dtype=torch.bool)
    padded[0, 0, 16:] = False
    with pytest.raises(dtem.DtemError, match="attention_mask"):
        model(**inputs, pixel_attention_mask=padded)
    tiny = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2}
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 60}
    with torch.device("meta"):
        config = transformers.Qwen2VLConfig(vision_config=tiny, text_config=text)
        qwen = transformers.Qwen2VLForConditionalGeneration(config)
    with pytest.raises(dtem.DtemError, match="packs the patches of all images into one sequence"):
        dtem.patch(qwen)


def test_verbs_for_other_tasks_refuse_it():
    model, _ = host("SmolVLM")
    with pytest.raises(dtem.DtemError, match="answers questions"):
        dtem.evaluate(model, "photos")
    with pytest.raises(dtem.DtemError, match="no masks to show"):
        dtem.show(dtem.patch(copy.deepcopy(model)), torch.zeros(32, 32, 3, dtype=torch.uint8).numpy())
