"""DINOv3 of transformers: its rotary positions travel with tokens (`rotary`)."""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import DINOv3ViTBackbone, DINOv3ViTModel
from transformers.models.dinov3_vit.modeling_dinov3_vit import (
    DINOv3ViTRopePositionEmbedding,
    augment_patches_center_coordinates,
)

from dtem import ops
from dtem.integrations.base import Attention, Merger, Mlp
from dtem.integrations.hf_base import HfIntegration, HostLayout, MergingLayers, Prepared, merges, merging_class
from dtem.integrations.rotary import Rotary, with_positions
from dtem.types import Taps


class GridAngles(NamedTuple):
    """What the layers get for the host's table of sines and cosines while tokens are merged."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
    rotary: Rotary


class MergingRope(DINOv3ViTRopePositionEmbedding):
    """The rotary embedding of a patched model."""

    merger: Merger
    """A plain attribute, as in `MergingLayers`."""

    def forward(self, pixel_values: Tensor) -> Any:
        """As the host's; while tokens are merged, the angles of a place instead of those of every patch."""
        if not merges(self.merger):
            return super().forward(pixel_values)
        patch = self.config.patch_size
        steps = (patch, patch) if isinstance(patch, int) else tuple(patch)
        grid = pixel_values.shape[-2] // steps[0], pixel_values.shape[-1] // steps[1]
        # Centres of patches, from −1 to 1: the first one, and its neighbour down and right.
        first = torch.tensor([1 / side - 1 for side in grid], device=pixel_values.device)
        both = torch.stack([first, first + torch.tensor([2 / side for side in grid], device=first.device)])
        if self.training:
            config = self.config
            augmentation = config.pos_embed_shift, config.pos_embed_jitter, config.pos_embed_rescale
            both = augment_patches_center_coordinates(both, *augmentation)
        exponents = torch.arange(0, 1, 4 / self.head_dim, device=first.device)
        return GridAngles(grid, Rotary.axial(2 * math.pi / self.base**exponents, both[0], both[1] - both[0], half=True))


class DinoV3Layers(MergingLayers):
    """Layers of DINOv3."""

    attention: ClassVar[str] = "attention"

    def prepare(self, x: Tensor, attention_mask: Tensor | None, inputs: dict[str, Any]) -> Prepared:
        x, _, _ = super().prepare(x, attention_mask, inputs)
        assert self.merger is not None
        prefix, angles = self.merger.method.host.prefix, inputs["position_embeddings"]
        split_block = functools.partial(_split, x.shape[-1], prefix, angles.rotary)
        return Prepared(with_positions(x, angles.grid, prefix), split_block)

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        raise AssertionError("its blocks are split by `prepare`, which knows the angles")


def _split(width: int, prefix: int, rotary: Rotary, layer: Any) -> tuple[Attention, Mlp]:
    return functools.partial(_attention, width, prefix, rotary, layer), functools.partial(_mlp, width, layer)


def _attention(
    width: int, prefix: int, rotary: Rotary, layer: Any, x: Tensor, bias: Tensor | None
) -> tuple[Tensor, Taps]:
    """Attention with its residual added. Methods get keys and queries before the rotation."""
    features, position = x[..., :width], x[..., width:]
    attn, h = layer.attention, layer.norm1(features)
    shape = (*h.shape[:2], -1, attn.head_dim)
    q, k, v = (project(h).view(shape).transpose(1, 2) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    taps = Taps(h, q, k, v, attn.scaling)
    q, k = rotary.rotate(q, k, position, prefix)
    y = ops.attend(q, k, v, bias, attn.scaling, attn.dropout if attn.training else 0.0).transpose(1, 2).flatten(2)
    y = features + layer.drop_path(layer.layer_scale1(attn.o_proj(y)))
    return torch.cat([y, position], dim=-1), taps


def _mlp(width: int, layer: Any, x: Tensor) -> Tensor:
    features, position = x[..., :width], x[..., width:]
    y = features + layer.drop_path(layer.layer_scale2(layer.mlp(layer.norm2(features))))
    return torch.cat([y, position], dim=-1)


MergingDINOv3ViTModel = merging_class(
    __name__, DINOv3ViTModel, HostLayout("model.layer", "norm", replaced=(("rope_embeddings", MergingRope),))
)


class HfDinoV3(HfIntegration):
    """Integration of transformers' DINOv3."""

    family: ClassVar[str] = "hf_dinov3"
    supported: ClassVar[str] = "transformers DINOv3 (DINOv3ViTModel), with dtem and tome"
    methods: ClassVar[frozenset[str] | None] = frozenset({"dtem", "tome"})
    layers = DinoV3Layers
    merged: ClassVar = {DINOv3ViTModel: MergingDINOv3ViTModel}
    refused: ClassVar = {
        DINOv3ViTBackbone: "it needs every patch in its place, and merged patches have none; use DINOv3ViTModel"
    }

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 1 + encoder.config.num_register_tokens, True
