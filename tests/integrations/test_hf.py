"""Models of transformers: their answers held against timm's and against the full grid, and what they refuse."""

import json

import pytest
import timm
import torch
import transformers as hf
from torch import nn

import dtem
from contract.hosts import R, ask, fresh, images, lively, patched
from contract.hosts import hf as tiny
from dtem import integrations, ops
from dtem.measure import flops

LAYERS = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**LAYERS, "image_size": 32, "patch_size": 4}


def as_timm(model):
    """timm's VisionTransformer with the weights of transformers' ViTForImageClassification."""
    twin = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=4,
        embed_dim=32,
        depth=4,
        num_heads=2,
        mlp_ratio=2,
        num_classes=5,
    )
    names = {
        "vit.embeddings.cls_token": "cls_token",
        "vit.embeddings.position_embeddings": "pos_embed",
        "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
        "vit.layernorm": "norm",
        "classifier": "head",
    }
    layer = {"layernorm_before": "norm1", "layernorm_after": "norm2", "attention.o_proj": "attn.proj"}
    layer |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    theirs, state = model.state_dict(), {}
    for index in range(4):
        names |= {f"vit.layers.{index}.{a}": f"blocks.{index}.{b}" for a, b in layer.items()}
        for kind in ("weight", "bias"):
            parts = [theirs[f"vit.layers.{index}.attention.{p}_proj.{kind}"] for p in "qkv"]
            state[f"blocks.{index}.attn.qkv.{kind}"] = torch.cat(parts)
    for a, b in names.items():
        for kind in ("", ".weight", ".bias"):
            if a + kind in theirs:
                state[b + kind] = theirs[a + kind]
    twin.load_state_dict(state)
    for module in twin.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = model.config.layer_norm_eps
    return twin.eval()


@pytest.mark.parametrize("method", ["dtem", "tome", "evit"])
def test_a_vit_merges_as_timms_does(method):
    model = fresh("hf_vit")
    twin, x = as_timm(model), images("hf_vit", batch=4)
    for each in (model, twin):
        dtem.patch(each, method, R)
    with torch.no_grad():
        torch.testing.assert_close(ask(model, x), twin(x), rtol=1e-4, atol=1e-4)
    if dtem.Handle(model).method.has_soft_mode():
        for each in (model, twin):
            dtem.Handle(each).mode = "soft"
        torch.testing.assert_close(ask(model, x), twin(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("build", "tower"),
    [
        (tiny("Dinov2ForImageClassification", mlp_ratio=2), "dinov2"),
        (tiny("Dinov2WithRegistersForImageClassification", mlp_ratio=2), "dinov2_with_registers"),
        (lambda: hf.SiglipForImageClassification(hf.SiglipConfig(vision_config=VISION, num_labels=5)), "vision_model"),
        (lambda: hf.CLIPForImageClassification(hf.CLIPConfig(vision_config=VISION, num_labels=5)), "vision_model"),
    ],
)
def test_means_are_those_of_the_full_grid(build, tower):
    model = lively(build()).eval()
    handle, x = dtem.patch(model, r=R), torch.randn(3, 3, 32, 32)
    with torch.no_grad(), handle.trace() as trace:
        logits = model(x).logits
    with torch.no_grad():
        tokens, prefix = getattr(model, tower)(x).last_hidden_state, handle.host.prefix
        mean = ops.unmerge(tokens, trace.sources[-1]).mean(dim=1)
        pooled = torch.cat([tokens[:, 0], mean], dim=1) if "dino" in tower else mean
        torch.testing.assert_close(logits, model.classifier(pooled), rtol=1e-4, atol=1e-4)
        plain = tokens[:, prefix:].mean(dim=1)
        assert not torch.allclose(plain, mean, atol=1e-2), "a plain mean of tokens is another"


def test_attention_pooling_is_that_of_the_full_grid():
    model, handle = patched("hf_siglip", "dtem")
    x = images("hf_siglip", batch=3)
    with torch.no_grad(), handle.trace() as trace:
        out = model(pixel_values=x)
    with torch.no_grad(), handle.at(r=0):  # plain features carry no sizes
        grid = ops.unmerge(out.last_hidden_state, trace.sources[-1])
        torch.testing.assert_close(out.pooler_output, model.head(grid), rtol=1e-4, atol=1e-4)
        alone = model.head(out.last_hidden_state.clone())
        assert not torch.allclose(alone, out.pooler_output, atol=1e-2), "without sizes it is another"


def clip():
    text = {**LAYERS, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 98}
    config = hf.CLIPConfig(vision_config=VISION, text_config=text, projection_dim=16)
    return lively(hf.CLIPModel(config)).eval()


def test_image_text_retrieval_works_unchanged():
    model, x = clip(), torch.randn(3, 3, 32, 32)
    words = torch.randint(1, 98, (2, 7))
    with torch.no_grad():
        before, text = model(input_ids=words, pixel_values=x), model.get_text_features(input_ids=words)
        handle = dtem.patch(model, r=R)
        merged = model(input_ids=words, pixel_values=x)
        features = model.get_image_features(pixel_values=x).pooler_output
    assert merged.logits_per_image.shape == (3, 2)
    assert torch.equal(merged.text_embeds, before.text_embeds), "texts are not touched"
    assert not torch.allclose(merged.image_embeds, before.image_embeds, atol=1e-3)
    unit = features / features.norm(dim=1, keepdim=True)
    torch.testing.assert_close(unit, merged.image_embeds)
    scores = model.logit_scale.detach().exp() * unit @ merged.text_embeds.T
    torch.testing.assert_close(merged.logits_per_image, scores)
    with torch.no_grad():
        handle.r = 0
        assert torch.equal(model(input_ids=words, pixel_values=x).logits_per_image, before.logits_per_image)
        assert torch.equal(model.get_text_features(input_ids=words).pooler_output, text.pooler_output)


def test_a_patched_model_saves_its_host_and_its_adapter_apart(tmp_path):
    model, handle = patched("hf_vit", "dtem")
    x = images("hf_vit")
    model.save_pretrained(tmp_path / "host")
    dtem.save_pretrained(handle, tmp_path / "adapter.safetensors")
    assert json.loads((tmp_path / "host" / "config.json").read_text())["architectures"] == ["ViTForImageClassification"]
    assert dtem.Handle(model).r == R, "it is still patched"
    again = hf.ViTForImageClassification.from_pretrained(tmp_path / "host").eval()
    dtem.from_pretrained(tmp_path / "adapter.safetensors", again)
    with torch.no_grad():
        assert torch.equal(ask(again, x), ask(model, x))
    with pytest.raises(dtem.DtemError, match=r"hf_vit.*hf_siglip"):
        dtem.from_pretrained(tmp_path / "adapter.safetensors", fresh("hf_siglip"))


@pytest.mark.parametrize("door", [{"output_hidden_states": True}, {"output_attentions": True}])
def test_what_speaks_of_every_token_is_refused_while_merging(door):
    model, handle = patched("hf_vit", "tome")
    x = images("hf_vit")
    with pytest.raises(dtem.DtemError, match=f"{next(iter(door))}.*handle.r = 0"):
        model(x, **door)
    handle.r = 0
    if "output_hidden_states" in door:
        assert len(model(x, **door).hidden_states) == 5


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (tiny("ViTForMaskedImageModeling"), "every patch in its place"),
        (tiny("Dinov2Backbone", mlp_ratio=2), "every patch in its place"),
        (tiny("BeitForImageClassification", use_relative_position_bias=True), "pair of positions"),
        (lambda: timm.create_model("beit_base_patch16_224", depth=1, embed_dim=32, num_heads=2), "pair of positions"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=12), "windows"),
        (
            lambda: hf.HieraModel(hf.HieraConfig(embed_dim=12, depths=[1, 1], num_heads=[1, 2], num_query_pool=1)),
            "pools neighbouring",
        ),
        (lambda: timm.create_model("hiera_tiny_224", embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)), "pools neighb"),
        (lambda: timm.create_model("samvit_base_patch16", depth=1, embed_dim=32, num_heads=2, img_size=64), "windows"),
        (lambda: hf.SamVisionModel(hf.SamVisionConfig(hidden_size=32, num_hidden_layers=1, image_size=32)), "windows"),
        (lambda: hf.SwinModel(hf.SwinConfig(embed_dim=12, depths=[1, 1], num_heads=[1, 2], image_size=32)), "windows"),
    ],
)
def test_refusals_say_why(build, said):
    with pytest.raises(dtem.DtemError, match=said):
        dtem.patch(build())


def test_a_subclass_is_refused():
    class Mine(hf.ViTModel):
        pass

    with pytest.raises(dtem.DtemError, match="subclass of transformers' ViTModel"):
        dtem.patch(Mine(tiny("ViTModel")().config))


def test_the_shortcut_is_refused():
    with pytest.raises(dtem.DtemError, match="shortcut"):
        dtem.patch(fresh("hf_vit"), r=R, shortcut=True)


def test_a_deit_has_two_prefix_tokens_and_registers_count():
    assert integrations.find(fresh("hf_deit")).describe(fresh("hf_deit")).prefix == 2
    assert integrations.find(fresh("hf_dinov2")).describe(fresh("hf_dinov2")).prefix == 5


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_folder_is_a_model(tmp_path, prefix):
    fresh("hf_vit").save_pretrained(tmp_path / "vit")
    handle = dtem.patch(dtem.create_model(f"{prefix}{tmp_path / 'vit'}"), r=0)
    # By hand: patch embedding, and 4 layers of 65 tokens of width 32 with MLPs of 64.
    layer = 65 * 32 * (3 * 32 + 32 + 2 * 64) + 2 * 65 * 65 * 32
    assert flops.count(handle.model, handle.host.image).macs == 64 * 32 * 48 + 4 * layer + 32 * 5
    handle.r = 9
    assert handle.tokens[-1] == 65 - 4 * 9
    x = images("hf_vit")
    with torch.no_grad():
        assert torch.equal(ask(handle.model, x), ask(patched("hf_vit", "dtem", r=9)[0], x))


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(dtem.DtemError, match="transformers cannot build"):
        dtem.create_model(str(tmp_path))
