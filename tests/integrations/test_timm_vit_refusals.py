"""timm's ViTs: image sizes and models, taken or refused."""

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

import dtem
from contract.hosts import R, every, fresh, images, lively, patched, vit
from dtem import schedule


@every(["dinov2_registers"], whole=True)
def test_dynamic_image_sizes(name, method):
    model, handle = patched(name, method)
    for height, width in ((32, 32), (48, 32), (20, 56), (8, 12)):
        x = torch.randn(2, 3, height, width)
        patches = height * width // 16
        plan = [] if handle.method.restores else schedule.clamp([R] * 4, patches)
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
