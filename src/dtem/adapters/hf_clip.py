"""CLIP's vision towers of transformers, and the layout of layers that GIT (`hf_git`) and SigLIP share with them."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import CLIPForImageClassification, CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection
from transformers.activations import GELUActivation

from dtem.adapters import lean
from dtem.adapters.base import Attention, Mlp
from dtem.adapters.hf import Anatomy, HfAdapter, Layers, MeanPooled, Merging, heads
from dtem.types import Taps

TOWER = Anatomy("encoder.layers", None)


class ClipLayers(Layers):
    """Layers as CLIP has them: `self_attn` and `mlp`, each behind a norm."""

    def halves(self, layer: Any) -> tuple[Attention, Mlp]:
        return partial(_attention, layer), partial(_mlp, layer)


def _attention(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn = layer.self_attn
    y, taps = heads(attn, layer.layer_norm1(x), bias, attn.scale, attn.dropout)
    space = None if lean.hooked(attn.out_proj) else lean.begin(x)
    return x + attn.out_proj(y) if space is None else space.residual(x, attn.out_proj, y), taps


def _mlp(layer: Any, x: Tensor) -> Tensor:
    inner, h = layer.mlp, layer.layer_norm2(x)
    space = None if lean.hooked(inner, *inner.children()) else lean.begin(x)
    if space is None:
        return x + inner(h)
    h = inner.fc1(h)
    plain = type(inner.activation_fn) is GELUActivation and inner.activation_fn.act is nn.functional.gelu
    h = torch.ops.aten.gelu_(h) if plain else inner.activation_fn(h)
    return space.residual(x, inner.fc2, h)


class MergingClipVision(Merging, CLIPVisionModel):
    """transformers' CLIPVisionModel, merging."""

    anatomy = TOWER


class MergingClipVisionWithProjection(Merging, CLIPVisionModelWithProjection):
    """transformers' CLIPVisionModelWithProjection, merging."""

    anatomy = replace(TOWER, tower="vision_model")


class MergingClip(Merging, CLIPModel):
    """transformers' CLIPModel, merging in its vision tower."""

    anatomy = replace(TOWER, tower="vision_model")


class MergingClipForImageClassification(MeanPooled, CLIPForImageClassification):
    """transformers' CLIPForImageClassification, merging."""

    anatomy = replace(TOWER, tower="vision_model", reads="mean")


class HfClip(HfAdapter):
    """Adapter of transformers' CLIP vision towers."""

    family: ClassVar[str] = "hf_clip"
    supported: ClassVar[str] = (
        "transformers CLIP vision towers (CLIPVisionModel, CLIPVisionModelWithProjection, CLIPModel, "
        "CLIPForImageClassification)"
    )
    layers = ClipLayers
    merged: ClassVar = {
        CLIPVisionModel: MergingClipVision,
        CLIPVisionModelWithProjection: MergingClipVisionWithProjection,
        CLIPModel: MergingClip,
        CLIPForImageClassification: MergingClipForImageClassification,
    }

    def key_attention(self, layer: Any) -> nn.Module:
        return layer.self_attn

    def prefix(self, tower: Any) -> tuple[int, bool]:
        return 1, True
