"""Variants: labels of adapters, shared weights, budgets."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import dtem
from dtem.errors import DtemError
from dtem.evaluation import variants


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


def test_patched_variants_share_weights_and_leave_the_model_alone(model: nn.Module, tmp_path: Path) -> None:
    dtem.patch(timm.create_model("test_vit", num_classes=3), r=8).save_pretrained(tmp_path / "a.safetensors")
    handles, _ = variants.patched_variants(model, ["tome"], tmp_path / "a.safetensors")
    assert list(handles) == ["tome", "dtem"]
    assert not hasattr(model, "dtem")
    for handle in handles.values():
        assert handle.model.blocks[0].attn.qkv.weight is model.blocks[0].attn.qkv.weight
        assert handle.model is not model


def variants_at(model: nn.Module, handle: dtem.Handle, *specs: str, **options: object) -> list[variants.Variant]:
    """Those of `handle`, without the unmerged model."""
    patched = [variants.PatchedModel(handle.method.name, handle, specs)]
    return variants.variants_of(model, patched, **options)[1:]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a=b.safetensors", ("a", "b.safetensors")),
        ("b.safetensors", (None, "b.safetensors")),
        ("owner/name", (None, "owner/name")),
        ("x=/a=b", ("x", "/a=b")),
    ],
)
def test_labels(text: str, parts: tuple[str | None, str]) -> None:
    assert variants.split_label(text) == parts


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.safetensors").touch()
    assert variants.split_label("lr=1.safetensors") == (None, "lr=1.safetensors")
    with pytest.raises(DtemError, match="LABEL=FILE"):
        variants.split_label("=x")


def test_labels_from_a_mapping() -> None:
    assert variants.labelled({"a": Path("x.safetensors")}) == [("a", "x.safetensors")]
    assert variants.labelled("x.safetensors") == [(None, "x.safetensors")]


def test_the_handle_keeps_its_own_r(model: nn.Module) -> None:
    handle = dtem.patch(copy.deepcopy(model), "tome", r=3)
    eight, none = variants_at(model, handle, "8"), variants_at(model, handle, "0", "learned")
    assert handle.r == 3
    assert none == []
    with handle.at(r=8):
        assert eight[0].tokens == handle.tokens[-1]


def test_a_cost_that_differs_from_image_to_image_is_that_of_the_images(model: nn.Module) -> None:
    handle = dtem.patch(copy.deepcopy(model), "ats")
    images = torch.randn(4, *handle.host.image)
    (variant,) = variants_at(model, handle, "8", batches=[images])
    assert variant.macs == 0
    variant.forward(images)
    measured = variants.with_measured_cost(variant)
    low, high = measured.macs_quartiles
    assert 0 < low <= measured.macs <= variants.variants_of(model, [])[0].macs
    assert low <= high


def test_a_budget_is_met_on_average_by_a_method_whose_cost_differs(model: nn.Module) -> None:
    handle = dtem.patch(copy.deepcopy(model), "ats")
    images = torch.randn(8, *handle.host.image)
    full = variants.variants_of(model, [])[0].macs / 1e9
    (variant,) = variants_at(model, handle, f"{0.8 * full:.4f}G", batches=[images])
    variant.forward(images)
    assert variants.with_measured_cost(variant).macs / 1e9 == pytest.approx(0.8 * full, rel=0.1)
    with pytest.raises(DtemError, match="cannot be met by ats"):
        variants.solve_budget(handle, "0.001G", [images])
