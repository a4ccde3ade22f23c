"""Vision encoders of CLIP and SigLIP in transformers. GIT (`hf_git`) has the same layers."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    SiglipForImageClassification,
    SiglipModel,
    SiglipVisionModel,
)
from transformers.activations import GELUActivation
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.git.modeling_git import GitVisionMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP

from dtem.hooks import are_untouched
from dtem.integrations import cpu_workspace
from dtem.integrations.base import Attention, Mlp
from dtem.integrations.hf_base import (
    HfIntegration,
    HostLayout,
    MeanPooled,
    MergingAttentionPool,
    MergingLayers,
    head_outputs,
    merging_class,
)
from dtem.types import Taps


class ClipLayers(MergingLayers):
    """Layers of CLIP: `self_attn` and `mlp`, each after a norm."""

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        return partial(_attention, layer), partial(_mlp, layer)


def _attention(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn = layer.self_attn
    y, taps = head_outputs(attn, layer.layer_norm1(x), bias, attn.scale, attn.dropout)
    workspace = cpu_workspace.create(x) if cpu_workspace.is_plain_linear(attn.out_proj) else None
    return x + attn.out_proj(y) if workspace is None else workspace.residual(x, attn.out_proj, y), taps


def _mlp(layer: Any, x: Tensor) -> Tensor:
    inner, h = layer.mlp, layer.layer_norm2(x)
    workspace = cpu_workspace.create(x)
    if workspace is None or not _is_plain(inner):
        return x + inner(h)
    h = inner.fc1(h)
    plain = type(inner.activation_fn) is GELUActivation and inner.activation_fn.act is nn.functional.gelu
    h = torch.ops.aten.gelu_(h) if plain else inner.activation_fn(h)
    return workspace.residual(x, inner.fc2, h)


def _is_plain(inner: nn.Module) -> bool:
    """Whether the MLP can be run layer by layer, with the last one's weights: nothing in it is replaced or hooked."""
    return (
        type(inner) in MLPS
        and are_untouched(inner, *inner.children())
        and cpu_workspace.is_plain_linear(inner.fc1)
        and cpu_workspace.is_plain_linear(inner.fc2)
    )


MLPS = (CLIPMLP, SiglipMLP, GitVisionMLP)
CLIP = HostLayout("encoder.layers", None)
SIGLIP = HostLayout(
    "encoder.layers", "post_layernorm", pooling="attention", replaced=(("head.attention", MergingAttentionPool),)
)
INNER = replace(CLIP, encoder="vision_model")
SIGLIP_INNER = replace(SIGLIP, encoder="vision_model")

MergingCLIPVisionModel = merging_class(__name__, CLIPVisionModel, CLIP)
MergingCLIPVisionModelWithProjection = merging_class(__name__, CLIPVisionModelWithProjection, INNER)
MergingCLIPModel = merging_class(__name__, CLIPModel, INNER)
MergingCLIPForImageClassification = merging_class(
    __name__, CLIPForImageClassification, replace(INNER, pooling="mean"), MeanPooled
)
MergingSiglipVisionModel = merging_class(__name__, SiglipVisionModel, SIGLIP)
MergingSiglipModel = merging_class(__name__, SiglipModel, SIGLIP_INNER)
MergingSiglipForImageClassification = merging_class(
    __name__, SiglipForImageClassification, replace(SIGLIP_INNER, pooling="mean"), MeanPooled
)


class HfClip(HfIntegration):
    """Integration of transformers' CLIP vision encoders."""

    family: ClassVar[str] = "hf_clip"
    supported: ClassVar[str] = (
        "transformers CLIP vision towers (CLIPVisionModel, CLIPVisionModelWithProjection, CLIPModel, "
        "CLIPForImageClassification)"
    )
    layers = ClipLayers
    merged: ClassVar = {
        CLIPVisionModel: MergingCLIPVisionModel,
        CLIPVisionModelWithProjection: MergingCLIPVisionModelWithProjection,
        CLIPModel: MergingCLIPModel,
        CLIPForImageClassification: MergingCLIPForImageClassification,
    }

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 1, True


class HfSiglip(HfIntegration):
    """Integration of transformers' SigLIP vision encoders: no class token, attention pooling by token size."""

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

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 0, False
