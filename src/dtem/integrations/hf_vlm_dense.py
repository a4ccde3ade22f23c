"""Vision-language models of transformers that arrange the tokens of the tower by their places afterwards: by pixel
shuffle (Idefics3, SmolVLM), by pooling (Gemma 3), or as one grid of several crops (LLaVA-NeXT, LLaVA-OneVision).

There every patch is needed, so merging is undone after each attention and MLP of the tower, as in Segmenter: the tower
computes less, and the language model reads as many tokens as before.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers import (
    CLIPVisionModel,
    Gemma3ForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionModel,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

from dtem import ops
from dtem.integrations.base import Merger, checkpointed
from dtem.integrations.dense import Component, run_block
from dtem.integrations.hf_base import HostLayout, Prepared, head_outputs, merging_class, rebind, with_sizes
from dtem.integrations.hf_clip import ClipLayers
from dtem.integrations.hf_tower import VisionLanguage
from dtem.methods.dense import DenseMethod, Grouped
from dtem.types import Tokens

QWEN = (
    "its tower packs the patches of all images into one sequence, attends within images or windows of them, and joins "
    "patches by their places afterwards: merged tokens have no place in that"
)


class DenseTowerLayers(ClipLayers):
    """The layers of a vision tower, each merging for its attention and for its MLP."""

    def run_merging(self, merger: Merger, prepared: Prepared, layers: list[Any], width: int) -> Tensor:
        method, x = merger.method, prepared.x
        assert isinstance(method, DenseMethod)
        candidates: list[ops.MergeCandidates] = []
        for index, (layer, r) in enumerate(zip(layers, merger.plan(x.shape[1] - method.host.prefix), strict=True)):
            components = split_layer(method, layer)
            step = functools.partial(run_block, method, index, components, r, merger.trace, candidates)
            x = checkpointed(step, x) if layer.gradient_checkpointing and x.requires_grad else step(x)
        merger.finish(Tokens(x, carry={"merge_candidates": tuple(candidates)}))
        return with_sizes(x, None, None)


def split_layer(method: DenseMethod, layer: Any) -> tuple[Component, Component]:
    """Attention and MLP of a layer, each with its norm."""

    def attention(grouped: Grouped) -> Tensor:
        attn = layer.self_attn
        y: Tensor = attn.out_proj(head_outputs(attn, grouped.x, method.bias_of(grouped), attn.scale, attn.dropout)[0])
        return y

    def mlp(grouped: Grouped) -> Tensor:
        y: Tensor = layer.mlp(grouped.x)
        return y

    return (layer.layer_norm1, attention), (layer.layer_norm2, mlp)


def _rebound(host: Callable[..., Any]) -> Callable[..., Any]:
    """The host's forward (with its signature, which `generate` inspects), after `rebind`."""

    @functools.wraps(host)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebind(self)
        return host(self, *args, **kwargs)

    return forward


def _merging_class(host: Any, tower: str) -> Any:
    layout = HostLayout("encoder.layers", None, encoder=f"model.{tower}", pooling="dense")
    return merging_class(__name__, host, layout, forward=_rebound(host.forward))


MergingIdefics3ForConditionalGeneration = _merging_class(Idefics3ForConditionalGeneration, "vision_model")
MergingSmolVLMForConditionalGeneration = _merging_class(SmolVLMForConditionalGeneration, "vision_model")
MergingGemma3ForConditionalGeneration = _merging_class(Gemma3ForConditionalGeneration, "vision_tower")
MergingLlavaNextForConditionalGeneration = _merging_class(LlavaNextForConditionalGeneration, "vision_tower")
MergingLlavaOnevisionForConditionalGeneration = _merging_class(LlavaOnevisionForConditionalGeneration, "vision_tower")


class HfVlmDense(VisionLanguage):
    """Integration of vision-language models that need every patch of the tower."""

    family: ClassVar[str] = "hf_vlm_dense"
    provides: ClassVar[frozenset[str]] = frozenset({"input"})
    supported: ClassVar[str] = (
        "transformers Idefics3, SmolVLM, Gemma 3, LLaVA-NeXT and LLaVA-OneVision with CLIP or SigLIP towers (dtem and "
        "tome; the language model reads as many tokens as before)"
    )
    layers = DenseTowerLayers
    towers = (CLIPVisionModel, SiglipVisionModel, Idefics3VisionTransformer, SmolVLMVisionTransformer)
    merged: ClassVar = {
        Idefics3ForConditionalGeneration: MergingIdefics3ForConditionalGeneration,
        SmolVLMForConditionalGeneration: MergingSmolVLMForConditionalGeneration,
        Gemma3ForConditionalGeneration: MergingGemma3ForConditionalGeneration,
        LlavaNextForConditionalGeneration: MergingLlavaNextForConditionalGeneration,
        LlavaOnevisionForConditionalGeneration: MergingLlavaOnevisionForConditionalGeneration,
    }

    def refusal(self, model: Any) -> str | None:
        name = type(model).__name__
        if re.fullmatch(r"Qwen.*VL(Moe)?ForConditionalGeneration", name):
            return QWEN
        return super().refusal(model)
