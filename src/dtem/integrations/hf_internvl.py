"""The vision encoder of InternVL (InternViT) in transformers."""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from transformers import InternVLVisionModel

from dtem import ops
from dtem.integrations.base import Attention, Mlp
from dtem.integrations.hf_base import HfIntegration, HostLayout, MergingLayers, merging_class
from dtem.types import Taps


class InternVLLayers(MergingLayers):
    """Layers of InternViT: norms of whole queries and keys, and a scale on each branch."""

    attention: ClassVar[str] = "attention"

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        return partial(_attention, layer), partial(_mlp, layer)


def _attention(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn, h = layer.attention, layer.layernorm_before(x)
    shape = (*h.shape[:2], attn.num_heads, attn.head_dim)
    parts = attn.q_norm(attn.q_proj(h)), attn.k_norm(attn.k_proj(h)), attn.v_proj(h)
    q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
    dropout = attn.attention_dropout if attn.training else 0.0
    y = ops.attend(q, k, v, bias, attn.scale, dropout).transpose(1, 2).flatten(2)
    y = attn.projection_dropout(attn.projection_layer(y))
    return x + layer.lambda_1 * y, Taps(h, q, k, v, attn.scale)


def _mlp(layer: Any, x: Tensor) -> Tensor:
    return x + layer.lambda_2 * layer.dropout(layer.mlp(layer.layernorm_after(x)))


MergingInternVLVisionModel = merging_class(__name__, InternVLVisionModel, HostLayout("encoder.layer", "layernorm"))


class HfInternVL(HfIntegration):
    """Integration of InternVL's vision encoder: on its own, not under a language model, which needs the grid."""

    family: ClassVar[str] = "hf_internvl"
    supported: ClassVar[str] = "transformers InternViT (InternVLVisionModel)"
    layers = InternVLLayers
    merged: ClassVar = {InternVLVisionModel: MergingInternVLVisionModel}

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 1, True
