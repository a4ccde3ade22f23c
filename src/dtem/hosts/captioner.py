"""A small captioner in the form of transformers' GIT, whose vision encoder starts from a plain timm ViT (DeiT).

GIT's encoder is CLIP's: q, k and v are layers of their own, patches have no bias, and a LayerNorm comes before the
first block, which a plain ViT does not have. None of that stands in the way:

* a plain ViT reads its residual stream through LayerNorms only, so the mean that the extra norm takes away from every
  token is never seen;
* the extra norm divides by √(variance + ε). With embeddings scaled down until ε outweighs their variance, it divides
  all of them by √ε, and its weight brings them back to the scale of the ViT.

So the encoder computes what the ViT computes, up to rounding, in a model that is saved and loaded like any GIT.
(The scaled embeddings are not fit to learn further: they and `pre_layrnorm` come frozen, and `loading.load` freezes
them again.)
"""

from collections.abc import Mapping
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from transformers import GitConfig, GitForCausalLM

from dtem.types import DtemError

SCALE = 1e-8
"""Of the embeddings: far below √ε."""
FIXED = ("embeddings", "pre_layrnorm")
"""Parts of the encoder that must not learn; the model's config names them."""


def captioner(vit: VisionTransformer, vocabulary: int, special: Mapping[str, int], **text: Any) -> GitForCausalLM:
    """A GIT with the encoder of `vit` and a random decoder.

    Args:
        vit: class token, mean-free head or none; as ``timm.create_model("deit_tiny_patch16_224")``.
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


def freeze_fixed(model: GitForCausalLM) -> None:
    """Freeze what the config says must not learn: of a GIT that was not built here, nothing."""
    for name in getattr(model.config, "dtem_fixed", ()):
        model.git.image_encoder.vision_model.get_submodule(name).requires_grad_(False)


def encoder_weights(vit: VisionTransformer) -> dict[str, Tensor]:
    """The weights of `vit`, for transformers' ``GitVisionModel``."""
    state, width, eps = vit.state_dict(), vit.embed_dim, float(vit.norm.eps)  # type: ignore[arg-type]
    place = state["pos_embed"][0].clone()
    place[1:] += state["patch_embed.proj.bias"]  # patches have no bias of their own there
    found = {
        "embeddings.class_embedding": SCALE * state["cls_token"][0, 0],
        "embeddings.patch_embedding.weight": SCALE * state["patch_embed.proj.weight"],
        "embeddings.position_embedding.weight": SCALE * place,
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
                found[f"encoder.layers.{layer}.self_attn.{name}_proj.{kind}"] = part
            for name in ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2"):
                found[f"encoder.layers.{layer}.{renamed.get(name, name)}.{kind}"] = state[
                    f"blocks.{layer}.{name}.{kind}"
                ]
    return {f"vision_model.{name}": part.clone() for name, part in found.items()}


def _check(vit: VisionTransformer) -> None:
    """Refuse a ViT that computes more than GIT's encoder can."""
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
