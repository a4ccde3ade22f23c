"""Rotary positions travel with the tokens. And other kinds of timm models that need no adapter of their own."""

import pytest
import timm
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat

import dtem
from contract.hosts import R, ask, fresh, images, lively, patched, vit
from dtem import ops
from dtem.integrations import timm_eva
from dtem.integrations.rotary import Rotary

EVA = "eva02_tiny_patch14_224"


DINOV3, MIXED, AXIAL, PE = (
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_patch16_rope_224",
    "vit_pe_core_tiny_patch16_384",
)
ANY_SIZE = {"dynamic_img_size": True, "img_size": (32, 48)}


@pytest.mark.parametrize(
    "build",
    [
        vit(EVA),
        vit(EVA, dynamic_img_size=True, qkv_fused=False),
        vit(EVA, ref_feat_shape=(4, 4)),
        vit("eva_giant_patch14_224"),
        vit(EVA, use_post_norm=True),
        vit(EVA, qk_norm=True, num_reg_tokens=2),
        vit(DINOV3, **ANY_SIZE),
        vit("vit_small_plus_patch16_dinov3_qkvb"),
        vit(MIXED, **ANY_SIZE),
        vit("vit_small_patch16_rope_mixed_ape_224"),
        vit(AXIAL, rope_grid_offset=0.5, **ANY_SIZE),
        vit("vit_medium_patch16_rope_reg1_gap_256"),
        vit(PE, **ANY_SIZE),
        vit("vit_pe_spatial_tiny_patch16_512"),
        vit("vit_small_patch16_lingbot", rope_grid_indexing="xy", **ANY_SIZE),
        vit("vit_base_patch16_sapiens2", num_heads=4, num_kv_heads=(4, 2, 1, 4)),
    ],
)
def test_the_walk_without_merging_is_the_hosts_forward(build):
    """Under a trace the walk runs even where nothing merges: its halves are the host's blocks, and their angles."""
    torch.manual_seed(0)
    host = lively(build()).eval()
    x = torch.randn(2, 3, *((40, 24) if host.dynamic_img_size else (32, 32)))
    with torch.no_grad():
        expected = host(x)
        if host.rope is not None:
            still = host.rope.get_embed
            host.rope.get_embed = lambda *args, **options: torch.zeros_like(still(*args, **options)) + 0.5
            assert not torch.allclose(host(x), expected, rtol=1e-2, atol=1e-2), "angles matter, or this shows nothing"
            del host.rope.get_embed
        handle = dtem.patch(host, "tome")
        with handle.trace():
            torch.testing.assert_close(host(x), expected, rtol=1e-4, atol=1e-4)


def test_the_walk_draws_the_hosts_random_coordinates():
    """DINOv3 shifts and scales its coordinates at random in training: the same draw, once for a forward."""
    torch.manual_seed(0)
    options = {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0}
    host, x = lively(vit(DINOV3, **options)()).train(), torch.randn(2, 3, 32, 32)
    torch.manual_seed(1)
    expected = host(x)
    handle = dtem.patch(host, "tome")
    with handle.trace():
        torch.manual_seed(1)
        torch.testing.assert_close(host(x), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(host(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["eva", "timm_dinov3"])
def test_in_half_precision_positions_are_still_those_of_the_patches(name):
    host, x = fresh(name), images(name)
    with torch.no_grad():
        expected = host(x)
        dtem.patch(host.bfloat16(), "tome")
        with dtem.Handle(host).trace():
            got = host(x.bfloat16()).float()
    assert (got - expected).abs().max() < 0.06 * expected.abs().max()


@pytest.mark.parametrize("method", ["dtem", "tome"])
def test_places_are_averaged_by_size(method, monkeypatch):
    model, handle = patched("eva", method)
    seen = []
    strip = timm_eva.MergingEva._features
    monkeypatch.setattr(
        timm_eva.MergingEva, "_features", lambda self, tokens: seen.append(tokens) or strip(self, tokens)
    )
    with torch.no_grad(), handle.trace() as trace:
        model(images("eva"))
    carried, source = seen[-1].x[..., -2:], trace.sources[-1]
    grid = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"), dim=-1).reshape(64, 2)
    for image in range(2):
        for token in source[image].unique():
            mean = grid[source[image] == token].mean(dim=0)
            torch.testing.assert_close(carried[image, token], mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eva", "timm_dinov3", "rope_mixed", "perception", "hf_dinov3"])
def test_where_a_token_is_matters(monkeypatch, name):
    """Were merged tokens put on the nearest patch, the answer would be another."""
    model, _ = patched(name, "tome")
    x, rotate = images(name), Rotary.rotate
    with torch.no_grad():
        averaged = ask(model, x)
        monkeypatch.setattr(Rotary, "rotate", lambda self, q, k, at, prefix: rotate(self, q, k, at.round(), prefix))
        assert not torch.allclose(ask(model, x), averaged, atol=1e-3)


def test_intermediates_have_the_full_grid():
    model, handle = patched("eva", "dtem")
    x = images("eva")
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        final, grids = model.forward_intermediates(x, output_fmt="NLC")
    assert [grid.shape for grid in grids] == [(2, 64, 32)] * 4
    torch.testing.assert_close(final[:, 1:], ops.unmerge(features, trace.sources[-1]), rtol=1e-4, atol=1e-5)


def test_methods_that_read_features_are_refused():
    with pytest.raises(dtem.DtemError, match=r"evit.*hold positions.*dtem, tome"):
        dtem.patch(fresh("eva"), "evit", r=R)


def test_other_rotary_embeddings_are_refused():
    class Curved(RotaryEmbeddingCat):
        """Of which nothing is known."""

    model = vit(AXIAL)()
    model.rope.__class__ = Curved
    with pytest.raises(dtem.DtemError, match=r"Curved is not known to be linear"):
        dtem.patch(model)


@pytest.mark.parametrize(
    ("name", "tokens", "prefix", "pooling"),
    [
        ("vit_small_patch14_reg4_dinov2", 37 * 37 + 5, 5, "prefix"),
        ("vit_betwixt_patch16_reg4_gap_256", 256 + 4, 4, "mean"),
        ("vit_small_r26_s32_224", 49 + 1, 1, "prefix"),
        ("vit_tiny_r_s16_p8_224", 196 // 4 + 1, 1, "prefix"),
        ("vit_base_patch16_siglip_224", 196, 0, "attention"),
        (EVA, 257, 1, "mean"),
        (DINOV3, 261, 5, "mean"),
        (MIXED, 197, 1, "prefix"),
        (PE, 577, 1, "attention"),
        ("vit_pe_lang_large_patch14_448", 1025, 1, "mean"),
        ("vit_base_patch16_sapiens2", 64 * 48 + 9, 9, "prefix"),
    ],
)
def test_registers_hybrid_stems_and_others_are_described(name, tokens, prefix, pooling):
    with torch.device("meta"):
        handle = dtem.patch(timm.create_model(name), r=4)
    assert handle.host.patches + handle.host.prefix == tokens
    assert handle.host.prefix == prefix
    assert handle.host.pooling == pooling
    assert handle.tokens[0] == tokens - 4


def test_a_hybrid_stem_merges():
    model = lively(vit("vit_tiny_r_s16_p8_224", img_size=64, patch_size=1)()).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        handle = dtem.patch(model, r=2)
        assert not torch.allclose(model(x), expected, atol=1e-4)
        handle.r = 0
        assert torch.equal(model(x), expected)
