"""AIMv2 of transformers: RMS norms, gated MLPs, no class token, attention pooling by token size."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F
from transformers import Aimv2Model, Aimv2VisionModel
from transformers.models.aimv2.modeling_aimv2 import Aimv2AttentionPoolingHead, Aimv2RMSNorm

from dtem.integrations.base import Attention, Merger, Mlp
from dtem.integrations.hf_base import (
    HfIntegration,
    HostLayout,
    MergingLayers,
    carried,
    head_outputs,
    merging_class,
    with_sizes,
)
from dtem.types import Taps


class Aimv2Layers(MergingLayers):
    """Layers of AIMv2: `attention` and `ffn`, each after a norm."""

    attention: ClassVar[str] = "attention"

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        return partial(_attention, layer), partial(_mlp, layer)


def _attention(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn = layer.attention
    y, taps = head_outputs(attn, layer.rms_norm1(x), bias, attn.scale, attn.dropout)
    return x + attn.out_proj(y), taps


def _mlp(layer: Any, x: Tensor) -> Tensor:
    return x + layer.ffn(layer.rms_norm2(x))


class MergingAimv2Norm(Aimv2RMSNorm):
    """The last norm of a patched model: its output carries the token sizes of its input."""

    def forward(self, hidden_states: Any) -> Tensor:
        y = super().forward(hidden_states)
        if not hasattr(hidden_states, "dtem_size"):
            return y
        return with_sizes(y, hidden_states.dtem_size, hidden_states.dtem_bias)


class MergingAimv2Pool(Aimv2AttentionPoolingHead):
    """Attention pooling in which a token of size m counts as m tokens."""

    merger: Merger
    """A plain attribute, as in `MergingLayers`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        bias = carried(hidden_states, "dtem_bias") if self.merger.active else None
        if bias is None:
            return super().forward(hidden_states)
        heads = (self.num_heads, -1)
        k, v = (part(hidden_states).unflatten(-1, heads).transpose(1, 2) for part in (self.k_proj, self.v_proj))
        q = self.cls_token.view(1, 1, *heads).transpose(1, 2).expand(k.shape[0], -1, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None].to(q.dtype))
        return self.output_proj(y.transpose(1, 2).flatten(2).squeeze(1))


TOWER = HostLayout(
    "encoder.layers",
    "rms_norm",
    pooling="attention",
    replaced=(("rms_norm", MergingAimv2Norm), ("head", MergingAimv2Pool)),
)
MergingAimv2VisionModel = merging_class(__name__, Aimv2VisionModel, TOWER)
MergingAimv2Model = merging_class(__name__, Aimv2Model, replace(TOWER, encoder="vision_model"))


class HfAimv2(HfIntegration):
    """Integration of transformers' AIMv2."""

    family: ClassVar[str] = "hf_aimv2"
    supported: ClassVar[str] = "transformers AIMv2 (Aimv2VisionModel, Aimv2Model)"
    layers = Aimv2Layers
    merged: ClassVar = {Aimv2VisionModel: MergingAimv2VisionModel, Aimv2Model: MergingAimv2Model}

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 0, False
