"""Towers of today's models in transformers: DINOv3, SigLIP 2 with padding, AIMv2, InternViT, and headless ones."""

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import dtem
from contract.hosts import R, ask, fresh, images, lively, patched
from contract.hosts import hf as tiny
from dtem import ops
from dtem.integrations.hf_logits import as_patches

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4}
PADDED = 60
"""Patches that an image is padded to."""


def naflex(**options):
    return lively(hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**SIZES, num_patches=64, **options))).eval()


def with_text(model, config, **vision):
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    text |= {"vocab_size": 99, "max_position_embeddings": 16, "projection_size": 32, **special}
    return lively(model(config(vision_config={**SIZES, **vision}, text_config=text))).eval()


@pytest.mark.parametrize(
    "build",
    [
        tiny("DINOv3ViTModel", num_register_tokens=2),
        tiny("DINOv3ViTModel", use_gated_mlp=True, image_size=(24, 40)),
        tiny("SiglipVisionModel", vision_use_head=False),
        tiny("Aimv2VisionModel"),
        tiny("Aimv2VisionModel", is_native=True, use_head=False),
        lambda: with_text(hf.Aimv2Model, hf.Aimv2Config, image_size=32),
        tiny("InternVLVisionModel", image_size=[32, 32], patch_size=[4, 4]),
        tiny("InternVLVisionModel", image_size=[32, 32], patch_size=[4, 4], use_qk_norm=True, norm_type="rms_norm"),
        tiny("InternVLVisionModel", image_size=[32, 32], patch_size=[4, 4], use_mean_pooling=False),
        naflex,
        lambda: naflex(vision_use_head=False),
        lambda: with_text(hf.Siglip2Model, hf.Siglip2Config, num_patches=64),
    ],
)
def test_the_walk_without_merging_is_the_hosts_forward(build):
    torch.manual_seed(0)
    host = lively(build()).eval()
    handle = dtem.patch(host, "tome")
    x = torch.randn(2, *handle.host.image)
    with torch.no_grad():
        expected = ask(host, x)
        with handle.trace() as trace:
            torch.testing.assert_close(ask(host, x), expected, rtol=1e-4, atol=1e-4)
        assert len(trace.sizes) == 4
        handle.r = R
        assert not torch.allclose(ask(host, x), expected, atol=1e-2)


def test_dinov3_merges_as_timms_does():
    """Same weights, same positions, same answer."""
    host = fresh("timm_dinov3")
    config = {"num_register_tokens": 4, "query_bias": False, "value_bias": False, "intermediate_size": 128}
    twin = tiny("DINOv3ViTModel", **config)().eval()
    theirs, state = host.state_dict(), {}
    names = {"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
    names |= {"attn.proj": "attention.o_proj"}
    for index in range(4):
        block, layer = f"blocks.{index}.", f"model.layer.{index}."
        for kind in ("weight", "bias"):
            state |= {f"{layer}{b}.{kind}": theirs[f"{block}{a}.{kind}"] for a, b in names.items()}
        q, k, v = theirs[f"{block}attn.qkv.weight"].chunk(3)
        state |= {f"{layer}attention.{name}_proj.weight": part for name, part in zip("qkv", (q, k, v), strict=True)}
        state |= {f"{layer}layer_scale{i}.lambda1": theirs[f"{block}gamma_{i}"] for i in (1, 2)}
    state |= {f"norm.{kind}": theirs[f"norm.{kind}"] for kind in ("weight", "bias")}
    state |= {f"embeddings.patch_embeddings.{kind}": theirs[f"patch_embed.proj.{kind}"] for kind in ("weight", "bias")}
    state |= {"embeddings.cls_token": theirs["cls_token"], "embeddings.register_tokens": theirs["reg_token"]}
    twin.load_state_dict(state | {"embeddings.mask_token": torch.zeros(1, 1, 32)})
    x = images("timm_dinov3", batch=3)
    for model in (host, twin):
        dtem.patch(model, "tome", r=R)
    with torch.no_grad():
        got, expected = twin(x).last_hidden_state, host.forward_features(x)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_dinov3_draws_the_hosts_random_coordinates():
    torch.manual_seed(0)
    options = {"pos_embed_shift": 0.3, "pos_embed_jitter": 1.5, "pos_embed_rescale": 2.0}
    host, x = lively(tiny("DINOv3ViTModel", **options)()).train(), torch.randn(2, 3, 32, 32)
    torch.manual_seed(1)
    expected = ask(host, x)
    handle = dtem.patch(host, "tome")
    with handle.trace():
        torch.manual_seed(1)
        torch.testing.assert_close(ask(host, x), expected, rtol=1e-4, atol=1e-4)


def padded_inputs(shapes, length=PADDED, seed=0):
    """Images of these grids as NaFlex passes them, with noise where there is padding."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(len(shapes), length, 48, generator=generator)
    mask = torch.zeros(len(shapes), length, dtype=torch.int64)
    for row, (height, width) in enumerate(shapes):
        mask[row, : height * width] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


SHAPES = [(6, 10), (5, 7), (7, 8), (6, 7)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("method", ["tome", "dtem"])
def test_padding_changes_nothing(method, proportional, attention):
    """Each image of a batch merges as it would on its own, without padding."""
    model = naflex()
    model.set_attn_implementation(attention)
    handle = dtem.patch(model, method, r=[5, 0, 6, 4], proportional=proportional)
    inputs = padded_inputs(SHAPES)
    with torch.no_grad(), handle.trace() as trace:
        together = model(**inputs)
    for row, (height, width) in enumerate(SHAPES):
        real = height * width
        alone = {name: part[row : row + 1] for name, part in inputs.items()}
        alone["pixel_values"] = alone["pixel_values"][:, :real]
        with torch.no_grad(), handle.trace() as own:
            expected = model(**{**alone, "pixel_attention_mask": None})
        torch.testing.assert_close(together.pooler_output[row : row + 1], expected.pooler_output, rtol=1e-4, atol=1e-4)
        left = expected.last_hidden_state.shape[1]
        assert left == real - 15
        torch.testing.assert_close(
            together.last_hidden_state[row, :left], expected.last_hidden_state[0], rtol=1e-4, atol=1e-4
        )
        assert torch.equal(trace.sources[-1][row, :real], own.sources[-1][0])
        assert (trace.sources[-1][row, real:] == -1).all(), "padding is in no token"
        assert torch.equal(trace.sizes[-1][row, :left], own.sizes[-1][0])
        assert (trace.sizes[-1][row, left:] == 0).all()


def test_without_merging_padding_is_the_hosts():
    model = naflex()
    inputs = padded_inputs(SHAPES)
    with torch.no_grad():
        expected = model(**inputs)
        handle = dtem.patch(model, "tome", r=0)
        assert torch.equal(model(**inputs).pooler_output, expected.pooler_output)
        with handle.trace():
            torch.testing.assert_close(model(**inputs).pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-4)


def test_an_image_of_few_patches_loses_padding_instead():
    model = naflex()
    dtem.patch(model, "tome", r=12)
    inputs = padded_inputs([(6, 10), (1, 1), (1, 2), (2, 3)])
    with torch.no_grad():
        out = model(**inputs)
    assert out.last_hidden_state.shape[1] == PADDED - 4 * 12
    assert out.pooler_output.isfinite().all()


def test_a_classifier_averages_what_is_no_padding():
    config = hf.Siglip2Config(vision_config={**SIZES, "num_patches": 64}, num_labels=5)
    model = lively(hf.Siglip2ForImageClassification(config)).eval()
    handle, inputs = dtem.patch(model, "tome", r=5), padded_inputs(SHAPES)
    with torch.no_grad(), handle.trace() as trace:
        logits = model(**inputs).logits
    with torch.no_grad():
        hidden = model.vision_model(**inputs).last_hidden_state
        for row, (height, width) in enumerate(SHAPES):
            grid = ops.unmerge(hidden[row : row + 1], trace.sources[-1][row : row + 1, : height * width])
            expected = model.classifier(grid.mean(dim=1))
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-4, atol=1e-4)


def test_soft_merging_refuses_padding_and_other_methods_are_refused():
    model = naflex()
    handle = dtem.patch(model, "dtem", r=5)
    handle.mode = "soft"
    with pytest.raises(dtem.DtemError, match="soft merging does not support padding"):
        model(**padded_inputs(SHAPES))
    ask(model, torch.randn(2, 3, 32, 32)).sum().backward()
    with pytest.raises(dtem.DtemError, match=r"patch_merger.*padding only these"):
        dtem.patch(naflex(), "patch_merger", r=5)


def test_patches_are_those_of_the_image_processor():
    processor = hf.Siglip2ImageProcessor(patch_size=4, max_num_patches=64)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    expected = processor(images=image, return_tensors="pt")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    got = as_patches(naflex(), (pixels - 0.5) / 0.5)
    torch.testing.assert_close(got["pixel_values"], expected["pixel_values"], rtol=1e-5, atol=1e-5)
    assert torch.equal(got["spatial_shapes"], expected["spatial_shapes"])


@pytest.mark.parametrize("name", ["hf_siglip2", "hf_aimv2"])
def test_attention_pooling_is_that_of_the_full_grid(name):
    model, handle = patched(name, "dtem")
    x = images(name, batch=3)
    with torch.no_grad(), handle.trace() as trace:
        pooled = ask(model, x)
    with torch.no_grad(), handle.at(r=0):
        grid = ops.unmerge(model_tokens(model, handle, x), trace.sources[-1])
        torch.testing.assert_close(model.head(grid).view_as(pooled), pooled, rtol=1e-4, atol=1e-4)


def model_tokens(model, handle, x):
    """The tokens after the last norm, with merging."""
    with handle.at(r=R):
        inputs = as_patches(model, x) if "Siglip2" in type(model).__name__ else {"pixel_values": x}
        return model(**inputs).last_hidden_state.clone()


def test_headless_features_are_the_mean_of_the_full_grid():
    torch.manual_seed(0)
    model = lively(tiny("SiglipVisionModel", vision_use_head=False)()).eval()
    handle, x = dtem.patch(model, "tome", r=R), images("hf_siglip")
    assert handle.host.pooling == "none"
    with torch.no_grad(), handle.trace() as trace:
        features, tokens = ask(model, x), model(pixel_values=x).last_hidden_state
    torch.testing.assert_close(features, ops.unmerge(tokens, trace.sources[-1]).mean(dim=1), rtol=1e-4, atol=1e-4)


def test_backbones_of_dinov3_are_refused():
    with pytest.raises(dtem.DtemError, match="every patch in its place"):
        dtem.patch(tiny("DINOv3ViTBackbone")())


def test_internvl_itself_is_refused_with_the_way_out():
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text |= {"vocab_size": 99, "num_key_value_heads": 2, "pad_token_id": 0, "model_type": "qwen2"}
    vision = {**SIZES, "image_size": [32, 32], "patch_size": [4, 4]}
    config = hf.InternVLConfig(vision_config=vision, text_config=text, image_token_id=5)
    with pytest.raises(dtem.DtemError, match=r"pixel shuffle.*InternVLVisionModel"):
        dtem.patch(hf.InternVLForConditionalGeneration(config))
