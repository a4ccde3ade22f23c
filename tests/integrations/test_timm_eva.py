"""EVA: rotary positions travel with the tokens. And other kinds of timm models that need no adapter of their own."""

import pytest
import timm
import torch

import dtem
from contract.hosts import R, fresh, images, lively, patched, vit
from dtem import ops
from dtem.integrations import timm_eva

EVA = "eva02_tiny_patch14_224"


@pytest.mark.parametrize("options", [{}, {"dynamic_img_size": True}, {"ref_feat_shape": (4, 4)}])
def test_places_of_patches_give_the_hosts_own_turns(options):
    model = vit(EVA, **options)()
    x = torch.zeros(1)
    place = timm_eva.patch_positions(model.rope, [8, 8], x)
    assert place.shape == (64, 2)
    rotations = timm_eva.rotations(
        place[None], timm_eva.frequency_bands(model.rope, x.device), getattr(model.rope, "rotate_half", False)
    )
    expected = model.rope.get_embed((8, 8)) if model.rope.pos_embed is None else model.rope.get_embed()
    torch.testing.assert_close(rotations[0, 0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [
        vit(EVA),
        vit(EVA, dynamic_img_size=True, qkv_fused=False),
        vit("eva_giant_patch14_224"),
        vit(EVA, use_post_norm=True),
        vit(EVA, qk_norm=True, num_reg_tokens=2),
    ],
)
def test_the_walk_without_merging_is_the_hosts_forward(build):
    """Under a trace the walk runs even where nothing merges: its halves are the host's blocks."""
    torch.manual_seed(0)
    host = lively(build()).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = host(x)
        handle = dtem.patch(host, "tome")
        with handle.trace():
            torch.testing.assert_close(host(x), expected, rtol=1e-4, atol=1e-4)


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
    grid = grid * torch.tensor(model.rope.ref_feat_shape or (8, 8)) / 8
    for image in range(2):
        for token in source[image].unique():
            mean = grid[source[image] == token].mean(dim=0)
            torch.testing.assert_close(carried[image, token], mean, rtol=1e-4, atol=1e-4)


def test_where_a_token_is_matters(monkeypatch):
    """Were merged tokens put on the nearest patch, the answer would be another."""
    model, _ = patched("eva", "tome")
    x, rotations = images("eva"), timm_eva.rotations
    with torch.no_grad():
        averaged = model(x)
        monkeypatch.setattr(timm_eva, "rotations", lambda at, bands, half: rotations(at.round(), bands, half))
        assert not torch.allclose(model(x), averaged, atol=1e-3)


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
    model = timm.create_model("vit_small_patch16_rope_mixed_224", depth=2, embed_dim=32, num_heads=2)
    with pytest.raises(dtem.DtemError, match=r"rotary embedding|own attention"):
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
