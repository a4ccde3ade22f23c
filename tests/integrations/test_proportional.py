"""Proportional attention: on by default, for MAE weights only in training."""

import pytest
import timm
import torch

import dtem


def tiny(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, patch_size=4, depth=2, embed_dim=32, num_heads=2, **options)
    return model.eval()


def test_on_by_default_in_both_modes():
    handle = dtem.patch(tiny(), r=8)
    for mode in ("hard", "soft"):
        handle.mode = mode
        assert handle.method.proportional


def test_mae_weights_have_it_in_training_only():
    handle = dtem.patch(tiny("vit_base_patch16_224.mae", num_classes=5, global_pool="avg"), r=8)
    assert not handle.method.proportional
    handle.mode = "soft"
    assert handle.method.proportional


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_base_patch16_224.mae"])
def test_the_user_decides(name):
    assert not dtem.patch(tiny(name), r=8, proportional=False).method.proportional
    assert dtem.patch(tiny(name), r=8, proportional=True).method.proportional


def test_it_changes_the_answer():
    model, images = tiny(num_classes=5), torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.head.weight)
    outputs = []
    for proportional in (True, False):
        handle = dtem.patch(model, r=16, proportional=proportional)
        with torch.no_grad():
            outputs.append(model(images))
        handle.unpatch()
    assert not torch.allclose(*outputs)
