"""ViT, DeiT (distillation token) and DINOv2 (registers) of transformers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
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

from dtem.integrations.base import Attention, Mlp
from dtem.integrations.hf_base import (
    HfIntegration,
    HostLayout,
    MeanPooled,
    MergingLayers,
    head_outputs,
    merging_class,
)
from dtem.types import Taps

Step = Callable[[Tensor], Tensor]
EVERY_PATCH = "it needs every patch in its place, and merged patches have none; use the model under it"


class VitLayers(MergingLayers):
    """Layers of ViT and DeiT (dropout on each branch) and of DINOv2 (layer scale and drop path)."""

    attention: ClassVar[str] = "attention"

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        if hasattr(layer, "layer_scale1"):  # DINOv2
            scale1, scale2 = layer.layer_scale1, layer.layer_scale2
            first = partial(_attention, layer, layer.norm1, lambda y: layer.drop_path(scale1(y)))
            return first, partial(_mlp, layer, layer.norm2, lambda y: layer.drop_path(scale2(y)))
        first = partial(_attention, layer, layer.layernorm_before, layer.dropout)
        return first, partial(_mlp, layer, layer.layernorm_after, layer.dropout)


def _attention(layer: Any, norm: Step, after: Step, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn = layer.attention
    y, taps = head_outputs(attn, norm(x), bias, attn.scaling, attn.attention_dropout)
    return x + after(attn.o_proj(y)), taps


def _mlp(layer: Any, norm: Step, after: Step, x: Tensor) -> Tensor:
    return x + after(layer.mlp(norm(x)))


VIT = HostLayout("layers", "layernorm")
DINO = HostLayout("encoder.layer", "layernorm")
DEIT_INNER = replace(VIT, encoder="deit")
DINO_MEAN = replace(DINO, encoder="dinov2", pooling="mean")
REGISTERS_MEAN = replace(DINO, encoder="dinov2_with_registers", pooling="mean")

MergingViTModel = merging_class(__name__, ViTModel, VIT)
MergingViTForImageClassification = merging_class(__name__, ViTForImageClassification, replace(VIT, encoder="vit"))
MergingDeiTModel = merging_class(__name__, DeiTModel, VIT)
MergingDeiTForImageClassification = merging_class(__name__, DeiTForImageClassification, DEIT_INNER)
MergingDeiTForImageClassificationWithTeacher = merging_class(
    __name__, DeiTForImageClassificationWithTeacher, DEIT_INNER
)
MergingDinov2Model = merging_class(__name__, Dinov2Model, DINO)
MergingDinov2ForImageClassification = merging_class(
    __name__, Dinov2ForImageClassification, DINO_MEAN, MeanPooled, with_class_token=True
)
MergingDinov2WithRegistersModel = merging_class(__name__, Dinov2WithRegistersModel, DINO)
MergingDinov2WithRegistersForImageClassification = merging_class(
    __name__, Dinov2WithRegistersForImageClassification, REGISTERS_MEAN, MeanPooled, with_class_token=True
)


class HfVit(HfIntegration):
    """Integration of transformers' ViT, DeiT and DINOv2."""

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

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        embeddings = encoder.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        count = 1 + hasattr(embeddings, "distillation_token") + (0 if registers is None else registers.shape[1])
        return count, True
