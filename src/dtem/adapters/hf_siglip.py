"""SigLIP vision towers of transformers. Their layers are laid out as CLIP's; they have no class token, and a query of
their own pools the patches, to which a token of size m counts as m."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from transformers import SiglipForImageClassification, SiglipModel, SiglipVisionModel

from dtem.adapters.hf import Anatomy, HfAdapter, MeanPooled, Merging
from dtem.adapters.hf_clip import ClipLayers

TOWER = Anatomy("encoder.layers", "post_layernorm", reads="attention")


class MergingSiglipVisionModel(Merging, SiglipVisionModel):
    """transformers' SiglipVisionModel, merging."""

    anatomy = TOWER


class MergingSiglipModel(Merging, SiglipModel):
    """transformers' SiglipModel, merging in its vision tower."""

    anatomy = replace(TOWER, tower="vision_model")


class MergingSiglipForImageClassification(MeanPooled, SiglipForImageClassification):
    """transformers' SiglipForImageClassification, merging."""

    anatomy = replace(TOWER, tower="vision_model", reads="mean")


class HfSiglip(HfAdapter):
    """Adapter of transformers' SigLIP vision towers."""

    family: ClassVar[str] = "hf_siglip"
    supported: ClassVar[str] = (
        "transformers SigLIP vision towers (SiglipVisionModel, SiglipModel, SiglipForImageClassification)"
    )
    layers = ClipLayers
    merged: ClassVar = {
        SiglipVisionModel: MergingSiglipVisionModel,
        SiglipModel: MergingSiglipModel,
        SiglipForImageClassification: MergingSiglipForImageClassification,
    }

    def refusal(self, model: Any) -> str | None:
        reason = super().refusal(model)
        if reason is None and not getattr(model, "vision_model", model).use_head:
            return "vision_use_head = False leaves it open how its tokens are read"
        return reason

    def key_attention(self, layer: Any) -> nn.Module:
        return layer.self_attn

    def prefix(self, tower: Any) -> tuple[int, bool]:
        return 0, False
