"""A model of transformers as a function from images to one tensor."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GitVisionModel, Siglip2ForImageClassification, Siglip2Model, Siglip2VisionModel

from dtem.integrations.hf_base import size_weighted_mean
from dtem.models import naflex

NAFLEX = (Siglip2Model, Siglip2VisionModel, Siglip2ForImageClassification)
"""Models that take patches instead of images."""
CLASS_TOKENS = ("cls_token", "class_embedding")
"""Names of a class token in the embeddings of an encoder."""


class LogitsModel(nn.Module):
    """A model of transformers as a function of images: logits, or pooled features if it has no classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        inner = getattr(self.model, "model", None)  # of vision-language models
        tower = getattr(inner, "vision_tower", None) or getattr(inner, "vision_model", None)
        if isinstance(tower, nn.Module):
            return _tower_tokens(tower, images).mean(dim=1)
        encoder: Any = getattr(getattr(self.model, "git", self.model), "image_encoder", self.model)  # of GIT
        inputs = as_patches(encoder, images) if isinstance(encoder, NAFLEX) else {"pixel_values": images}
        out = getattr(encoder, "get_image_features", encoder)(**inputs)
        for name in ("logits", "image_embeds", "pooler_output"):
            if getattr(out, name, None) is not None:
                return getattr(out, name)
        if isinstance(out, Tensor):
            return out
        hidden: Tensor = out.last_hidden_state
        if isinstance(encoder, GitVisionModel):
            return hidden.mean(dim=1)
        if any(hasattr(getattr(encoder, "embeddings", None), name) for name in CLASS_TOKENS):
            return hidden[:, 0]
        return size_weighted_mean(hidden, 0) if hasattr(hidden, "dtem_size") else hidden.mean(dim=1)


def _tower_tokens(tower: Any, images: Tensor) -> Tensor:
    """The output of the vision tower of a vision-language model."""
    tokens: Tensor
    if images.is_meta and hasattr(tower.embeddings, "num_patches_per_side"):  # it looks positions up by data
        x = tower.embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
        tokens = tower.post_layernorm(tower.encoder(inputs_embeds=x).last_hidden_state)
    else:
        tokens = tower(pixel_values=images).last_hidden_state
    return tokens


def as_patches(model: Any, images: Tensor) -> dict[str, Any]:
    """Images (b, c, h, w) as the inputs of a NaFlex model, without padding: as its image processor cuts them.

    Packed patches (b, n + 1, d) are images of any shape, with padding (`dtem.models.naflex`).
    """
    if images.ndim == 3:
        return naflex.unpack(images)
    patch = getattr(model.config, "vision_config", model.config).patch_size
    grid = [side // patch for side in images.shape[-2:]]
    batch, channels = images.shape[:2]
    patches = images.reshape(batch, channels, grid[0], patch, grid[1], patch).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": patches.reshape(batch, grid[0] * grid[1], -1),
        "pixel_attention_mask": None,
        "spatial_shapes": torch.tensor([grid], device="cpu").expand(batch, 2),  # the host reads its values
    }
