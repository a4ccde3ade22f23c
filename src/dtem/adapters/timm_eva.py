"""timm's EVA and EVA-02: rotary positions travel with the tokens.

RoPE turns queries and keys by angles that are linear in a patch's place. While tokens merge, each carries its place as
two more channels behind its features; so places are averaged by size, softly or hard, just as features are, and every
block turns a token by the angles of its mean place. Before anything is merged that is the host's own embedding.
"""

import functools
from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, build_fourier_pos_embed, freq_bands, pixel_freq_bands
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from dtem import ops
from dtem.adapters.base import Attention, Mlp, walk
from dtem.adapters.images import check_image
from dtem.adapters.timm_vit import Merging, TimmVit, grid
from dtem.types import DtemError, Taps, Tokens

PLACE = 2
"""Channels behind the features: row and column."""


class TimmEva(TimmVit):
    """Adapter of timm's Eva."""

    family: ClassVar[str] = "timm_eva"
    supported: ClassVar[str] = "timm EVA and EVA-02 models (eva_*, eva02_*), with dtem, tome and their variants"
    shortcuts: ClassVar[bool] = False
    methods: ClassVar[frozenset[str] | None] = frozenset({"dtem", "dtem_no_prop", "tome", "tome_soft", "tome_gumbel"})

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, Eva):
            return ""
        if type(model) is not Eva:
            return "it is a subclass of timm's Eva with a forward of its own"
        for layer, block in enumerate(model.blocks):
            if type(block) not in (EvaBlock, EvaBlockPostNorm) or type(block.attn) is not EvaAttention:
                return f"block {layer} has a {type(block.attn).__name__}, not EVA's own attention"
        if model.rope is not None and type(model.rope) is not RotaryEmbeddingCat:
            return f"its rotary positions are of {type(model.rope).__name__}, whose angles are not linear in the place"
        if model.patch_drop is not None:
            return "it drops patches at random (patch_drop_rate); build it without"
        return None if model.global_pool in ("token", "avg", "") else f"global_pool = {model.global_pool!r}"

    def attach(self, model: Any, merger: Any) -> None:
        model.dtem = merger
        model.__class__ = MergingEva

    def class_token(self, model: Any) -> bool:
        return model.cls_token is not None

    def head_mean_keys(self, attn: Any) -> tuple[Tensor, Tensor | None]:
        heads = (attn.num_heads, -1)
        if attn.qkv is None:
            weight, bias = attn.k_proj.weight, attn.k_proj.bias
        else:
            weight, bias = attn.qkv.weight.chunk(3)[1], None if attn.q_bias is None else attn.k_bias
        with torch.no_grad():
            return weight.unflatten(0, heads).mean(dim=0), None if bias is None else bias.unflatten(0, heads).mean(
                dim=0
            )


class MergingEva(Merging, Eva):
    """timm's Eva, merging."""

    @property
    def pool_include_prefix(self) -> bool:
        """EVA's attention pooling reads all tokens, its mean the patches."""
        return self.attn_pool is not None

    def _embed(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Image to tokens, each with its place."""
        if attn_mask is not None or is_causal:
            raise DtemError("attn_mask and is_causal cannot be used while tokens are merged; set handle.r = 0")
        check_image(self, x)
        rows_columns = [side // step for side, step in zip(x.shape[-2:], self.patch_embed.patch_size, strict=True)]
        x = self.norm_pre(self._pos_embed(self.patch_embed(x))[0])
        if self.rope is None:
            return x
        place = places(self.rope, rows_columns, x)
        place = nn.functional.pad(place, (0, 0, self.num_prefix_tokens, 0))
        return torch.cat([x, place.to(x.dtype).expand(x.shape[0], -1, -1)], dim=2)

    def _walk(self, x: Tensor, blocks: int | None = None, grids: list[Tensor] | None = None) -> Tokens:
        bands = None if self.rope is None else bands_of(self.rope, x.device)
        halves = functools.partial(_halves, self.embed_dim, self.num_prefix_tokens, bands)
        seen = (
            None if grids is None else lambda tokens: grids.append(grid(self._features(tokens), self.num_prefix_tokens))
        )
        tokens = walk(self.dtem, x, self.blocks[:blocks], halves, self.grad_checkpointing, seen)
        return self._features(tokens)

    def _features(self, tokens: Tokens) -> Tokens:
        return tokens.replace(x=tokens.x[..., : self.embed_dim])


def bands_of(rope: RotaryEmbeddingCat, device: torch.device) -> Tensor:
    """Angle per unit of place, by channel."""
    if rope.bands is not None:
        return rope.bands
    if rope.in_pixels:
        return pixel_freq_bands(rope.dim // 4, float(rope.max_res), linear_bands=rope.linear_bands).to(device)
    return freq_bands(rope.dim // 4, temperature=rope.temperature, step=1).to(device)


def places(rope: RotaryEmbeddingCat, shape: list[int], like: Tensor) -> Tensor:
    """Row and column of every patch, in the units of the host's angles: (p, 2)."""
    known = ("in_pixels", "ref_feat_shape", "grid_offset", "grid_indexing")  # as far as this version of timm has them
    settings = {name: getattr(rope, name) for name in known if hasattr(rope, name)}
    bands = torch.ones(1, device=like.device)
    return build_fourier_pos_embed(shape, bands=bands, include_grid=True, **settings)[0].reshape(-1, PLACE)


def turns(place: Tensor, bands: Tensor, half: bool) -> Tensor:
    """Sines and cosines for tokens at these places (b, n, 2), as timm lays them out: (b, 1, n, 2 e)."""
    angle = (place.unsqueeze(-1).float() * bands.float()).flatten(2)
    angle = torch.cat([angle, angle], dim=-1) if half else angle.repeat_interleave(2, dim=-1)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).unsqueeze(1)


def _halves(width: int, prefix: int, bands: Tensor | None, block: Any) -> tuple[Attention, Mlp]:
    return functools.partial(_attention, width, prefix, bands, block), functools.partial(_mlp, width, block)


def _attention(
    width: int, prefix: int, bands: Tensor | None, block: Any, x: Tensor, bias: Tensor | None
) -> tuple[Tensor, Taps]:
    """The attention half; a method sees keys and queries before they are turned."""
    features, place = x[..., :width], x[..., width:]
    after = isinstance(block, EvaBlockPostNorm)
    h = features if after else block.norm1(features)
    attn = block.attn
    q, k, v = _project(attn, h)
    q, k = attn.q_norm(q), attn.k_norm(k)
    seen = Taps(h, q, k, v, attn.scale)
    if bands is not None:
        half = getattr(attn, "rotate_half", False)
        angles = turns(place[:, prefix:], bands, half)
        how = (half,) if half else ()  # timm 1.0.16 knows one way only
        q, k = (
            torch.cat([part[:, :, :prefix], apply_rot_embed_cat(part[:, :, prefix:], angles, *how)], dim=2).type_as(v)
            for part in (q, k)
        )
    y = ops.attend(q, k, v, bias, attn.scale, attn.attn_drop.p if attn.training else 0.0)
    y = attn.norm(y.transpose(1, 2).reshape(h.shape))
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(h).sigmoid()
    y = attn.proj_drop(attn.proj(y))
    y = block.norm1(y) if after else _scaled(block.gamma_1, y)
    return torch.cat([features + block.drop_path1(y), place], dim=-1), seen


def _mlp(width: int, block: Any, x: Tensor) -> Tensor:
    features, place = x[..., :width], x[..., width:]
    if isinstance(block, EvaBlockPostNorm):
        y = block.norm2(block.mlp(features))
    else:
        y = _scaled(block.gamma_2, block.mlp(block.norm2(features)))
    return torch.cat([features + block.drop_path2(y), place], dim=-1)


def _scaled(gamma: Tensor | None, y: Tensor) -> Tensor:
    return y if gamma is None else gamma * y


def _project(attn: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (b, h, n, e)."""
    heads = (attn.num_heads, -1)
    if attn.qkv is None:
        q, k, v = (part(h).unflatten(-1, heads).transpose(1, 2) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    bias = None if attn.q_bias is None else torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    qkv = attn.qkv(h) if bias is None else nn.functional.linear(h, attn.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
