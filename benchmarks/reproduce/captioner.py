"""A small GIT captioner (transformers) whose vision encoder has the weights of a plain timm ViT (DeiT).

GIT's encoder is CLIP's: separate q, k and v layers, no bias of the patch embedding, and a LayerNorm before the first
block, which a plain ViT does not have. The ViT's weights can be converted exactly, up to rounding:

* a plain ViT reads its residual stream through LayerNorms only, so that it does not matter that the extra norm
  subtracts each token's mean;
* the extra norm divides by √(variance + ε). The embeddings are scaled down until their variance is far below ε, so
  that it divides every token by √ε; its weight restores the scale.

The scaled embeddings cannot be trained further: they and `pre_layrnorm` are frozen, also after loading
(`models.git.load`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from transformers import GitConfig, GitForCausalLM

from dtem.errors import DtemError
from dtem.models.git import freeze_fixed

SCALE = 1e-8
"""Scale of the embeddings: far below √ε."""
FIXED = ("embeddings", "pre_layrnorm")
"""Parts of the encoder that stay frozen; listed in the model's config."""


def captioner(vit: VisionTransformer, vocabulary: int, special: Mapping[str, int], **text: Any) -> GitForCausalLM:
    """A GIT with the encoder of `vit` and a random decoder.

    Args:
        vit: a plain timm ViT with a class token, such as ``deit_tiny_patch16_224``.
        vocabulary: size of the tokenizer.
        special: ids of the tokens ``bos``, ``eos`` and ``pad``.
        text: settings of the decoder, by the names of ``GitConfig``.
    """
    _check(vit)
    block: Any = vit.blocks[0]
    norm: Any = vit.norm
    config = GitConfig(
        vision_config={
            "hidden_size": vit.embed_dim,
            "intermediate_size": block.mlp.fc1.out_features,
            "num_hidden_layers": len(vit.blocks),
            "num_attention_heads": block.attn.num_heads,
            "num_channels": vit.patch_embed.proj.in_channels,
            "image_size": vit.patch_embed.img_size[0],
            "patch_size": vit.patch_embed.patch_size[0],
            "hidden_act": "gelu",
            "layer_norm_eps": norm.eps,
        },
        vocab_size=vocabulary,
        bos_token_id=special["bos"],
        eos_token_id=special["eos"],
        pad_token_id=special["pad"],
        dtem_fixed=list(FIXED),
        **text,
    )
    model = GitForCausalLM(config)
    model.git.image_encoder.load_state_dict(encoder_weights(vit))
    freeze_fixed(model)
    return model


def encoder_weights(vit: VisionTransformer) -> dict[str, Tensor]:
    """The weights of `vit`, for transformers' ``GitVisionModel``."""
    state, width, eps = vit.state_dict(), vit.embed_dim, float(vit.norm.eps)  # type: ignore[arg-type]
    positions = state["pos_embed"][0].clone()
    positions[1:] += state["patch_embed.proj.bias"]  # GIT's patch embedding has no bias
    weights = {
        "embeddings.class_embedding": SCALE * state["cls_token"][0, 0],
        "embeddings.patch_embedding.weight": SCALE * state["patch_embed.proj.weight"],
        "embeddings.position_embedding.weight": SCALE * positions,
        "pre_layrnorm.weight": torch.full((width,), eps**0.5 / SCALE),
        "pre_layrnorm.bias": torch.zeros(width),
        "post_layernorm.weight": state["norm.weight"],
        "post_layernorm.bias": state["norm.bias"],
    }
    renamed = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj"}
    for layer in range(len(vit.blocks)):
        for kind in ("weight", "bias"):
            q, k, v = state[f"blocks.{layer}.attn.qkv.{kind}"].chunk(3)
            for name, part in (("q", q), ("k", k), ("v", v)):
                weights[f"encoder.layers.{layer}.self_attn.{name}_proj.{kind}"] = part
            for name in ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2"):
                weights[f"encoder.layers.{layer}.{renamed.get(name, name)}.{kind}"] = state[
                    f"blocks.{layer}.{name}.{kind}"
                ]
    return {f"vision_model.{name}": part.clone() for name, part in weights.items()}


def _check(vit: VisionTransformer) -> None:
    """Refuse a ViT that GIT's encoder cannot represent."""
    plain = vit.num_prefix_tokens == 1 and vit.has_class_token and isinstance(vit.norm_pre, nn.Identity)
    for block in vit.blocks:
        assert isinstance(block, nn.Module)
        inner: Any = block
        plain = plain and type(block) is Block and isinstance(inner.attn.q_norm, nn.Identity)
        plain = plain and isinstance(inner.ls1, nn.Identity) and isinstance(inner.mlp.act, nn.GELU)
        plain = plain and inner.attn.qkv.bias is not None
    if not plain or isinstance(vit.norm, nn.Identity):
        raise DtemError(
            "a captioner can be built on a plain ViT only (one class token, no layer scale, no qk-norm, no norm before "
            "the blocks, a norm after them): deit_tiny_patch16_224, deit_small_patch16_224, vit_*_augreg …"
        )
