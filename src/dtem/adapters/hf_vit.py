"""ViT, DeiT (distillation token) and DINOv2 (registers) of transformers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTForMaskedImageModeling,
    DeiTModel,
    Dinov2Backbone,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

from dtem.adapters.base import Attention, Mlp
from dtem.adapters.hf import Anatomy, HfAdapter, Layers, MeanPooled, Merging, heads
from dtem.types import Taps

Step = Callable[[Tensor], Tensor]
EVERY_PATCH = "it reads every patch in its place, and merged patches have none; use the model under it"


class VitLayers(Layers):
    """Layers with `attention` between norms. ViT and DeiT drop out what DINOv2 scales, or leaves out now and then."""

    def halves(self, layer: Any) -> tuple[Attention, Mlp]:
        if _dino(layer):
            scale1, scale2 = layer.layer_scale1, layer.layer_scale2
            first = partial(_attention, layer, layer.norm1, lambda y: layer.drop_path(scale1(y)))
            return first, partial(_mlp, layer, layer.norm2, lambda y: layer.drop_path(scale2(y)))
        first = partial(_attention, layer, layer.layernorm_before, layer.dropout)
        return first, partial(_mlp, layer, layer.layernorm_after, layer.dropout)


def _attention(layer: Any, norm: Step, after: Step, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn = layer.attention
    y, taps = heads(attn, norm(x), bias, attn.scaling, attn.attention_dropout)
    return x + after(attn.o_proj(y)), taps


def _mlp(layer: Any, norm: Step, after: Step, x: Tensor) -> Tensor:
    return x + after(layer.mlp(norm(x)))


def _dino(layer: nn.Module) -> bool:
    return hasattr(layer, "layer_scale1")


PLAIN = Anatomy("layers", "layernorm")
DINO = Anatomy("encoder.layer", "layernorm")


class MergingViTModel(Merging, ViTModel):
    """transformers' ViTModel, merging."""

    anatomy = PLAIN


class MergingViTForImageClassification(Merging, ViTForImageClassification):
    """transformers' ViTForImageClassification, merging."""

    anatomy = replace(PLAIN, tower="vit")


class MergingDeiTModel(Merging, DeiTModel):
    """transformers' DeiTModel, merging."""

    anatomy = PLAIN


class MergingDeiTForImageClassification(Merging, DeiTForImageClassification):
    """transformers' DeiTForImageClassification, merging."""

    anatomy = replace(PLAIN, tower="deit")


class MergingDeiTForImageClassificationWithTeacher(Merging, DeiTForImageClassificationWithTeacher):
    """transformers' DeiTForImageClassificationWithTeacher, merging."""

    anatomy = replace(PLAIN, tower="deit")


class MergingDinov2Model(Merging, Dinov2Model):
    """transformers' Dinov2Model, merging."""

    anatomy = DINO


class MergingDinov2ForImageClassification(MeanPooled, Dinov2ForImageClassification):
    """transformers' Dinov2ForImageClassification, merging."""

    anatomy = replace(DINO, tower="dinov2", reads="mean")
    with_class = True


class MergingDinov2WithRegistersModel(Merging, Dinov2WithRegistersModel):
    """transformers' Dinov2WithRegistersModel, merging."""

    anatomy = DINO


class MergingDinov2WithRegistersForImageClassification(MeanPooled, Dinov2WithRegistersForImageClassification):
    """transformers' Dinov2WithRegistersForImageClassification, merging."""

    anatomy = replace(DINO, tower="dinov2_with_registers", reads="mean")
    with_class = True


class HfVit(HfAdapter):
    """Adapter of transformers' ViT, DeiT and DINOv2."""

    family: ClassVar[str] = "hf_vit"
    supported: ClassVar[str] = (
        "transformers ViT, DeiT (with distillation token) and DINOv2 (with registers): the bare models and "
        "…ForImageClassification"
    )
    layers = VitLayers
    merged: ClassVar = {
        ViTModel: MergingViTModel,
        ViTForImageClassification: MergingViTForImageClassification,
        DeiTModel: MergingDeiTModel,
        DeiTForImageClassification: MergingDeiTForImageClassification,
        DeiTForImageClassificationWithTeacher: MergingDeiTForImageClassificationWithTeacher,
        Dinov2Model: MergingDinov2Model,
        Dinov2ForImageClassification: MergingDinov2ForImageClassification,
        Dinov2WithRegistersModel: MergingDinov2WithRegistersModel,
        Dinov2WithRegistersForImageClassification: MergingDinov2WithRegistersForImageClassification,
    }
    refused: ClassVar = dict.fromkeys(
        (ViTForMaskedImageModeling, DeiTForMaskedImageModeling, Dinov2Backbone, Dinov2WithRegistersBackbone),
        EVERY_PATCH,
    )

    def key_attention(self, layer: Any) -> nn.Module:
        return layer.attention

    def prefix(self, tower: Any) -> tuple[int, bool]:
        embeddings = tower.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        count = 1 + hasattr(embeddings, "distillation_token") + (0 if registers is None else registers.shape[1])
        return count, True
