"""timm's EVA and EVA-02, with rotary position embeddings (RoPE) of merged tokens.

RoPE rotates queries and keys by angles that are linear in the patch position. While tokens are merged, each has its
position as two more channels after its features: so positions are averaged by size, soft or hard, as features are, and
every block rotates a token by the angles of its mean position. Before the first merge this is the host's own embedding.
"""

import functools
from typing import Any, ClassVar

import torch
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    apply_rot_embed_cat,
    build_fourier_pos_embed,
    freq_bands,
    pixel_freq_bands,
)
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.integrations.base import Attention, Mlp, linear_weights, run_blocks
from dtem.integrations.timm_vit import Merging, TimmVit, check_image, full_grid
from dtem.types import Taps, Tokens

POSITION = 2
"""Channels after the features: row and column."""


class TimmEva(TimmVit):
    """Integration of timm's Eva."""

    family: ClassVar[str] = "timm_eva"
    supported: ClassVar[str] = "timm EVA and EVA-02 models (eva_*, eva02_*), with dtem and tome"
    shortcuts: ClassVar[bool] = False
    methods: ClassVar[frozenset[str] | None] = frozenset({"dtem", "tome"})

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, Eva):
            return ""
        if type(model) is not Eva:
            return "it is a subclass of timm's Eva with a forward of its own"
        for layer, block in enumerate(model.blocks):
            if type(block) not in (EvaBlock, EvaBlockPostNorm) or type(block.attn) is not EvaAttention:
                return f"block {layer} has a {type(block.attn).__name__}, not EVA's own attention"
        if model.rope is not None and type(model.rope) is not RotaryEmbeddingCat:
            return (
                f"rotary embedding {type(model.rope).__name__} is not supported: its angles are not linear in the "
                "patch position, so merged tokens have none"
            )
        if model.patch_drop is not None:
            return "patch_drop_rate is not supported; build it without"
        return None if model.global_pool in ("token", "avg", "") else f"global_pool = {model.global_pool!r}"

    def attach(self, model: Any, merger: Any) -> None:
        model.dtem = merger
        model.__class__ = MergingEva

    def class_token(self, model: Any) -> bool:
        return model.cls_token is not None

    def head_mean_keys(self, attn: Any) -> tuple[Tensor, Tensor | None]:
        heads = (attn.num_heads, -1)
        if attn.qkv is None:
            weight, bias = linear_weights(attn.k_proj)
        else:
            weight = linear_weights(attn.qkv)[0].chunk(3)[1]
            bias = None if attn.q_bias is None else attn.k_bias
        with torch.no_grad():
            return weight.unflatten(0, heads).mean(dim=0), None if bias is None else bias.unflatten(0, heads).mean(
                dim=0
            )


class MergingEva(Merging, Eva):  # type: ignore[misc]  # looser signatures, for all versions of timm
    """timm's Eva, merging."""

    @property
    def pool_include_prefix(self) -> bool:
        """Attention pooling of EVA reads all tokens, its mean the patches only."""
        return self.attn_pool is not None

    def _embed(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Patch embedding, with the position of every token as further channels."""
        if attn_mask is not None or is_causal:
            raise DtemError("attn_mask and is_causal cannot be used while tokens are merged; set handle.r = 0")
        check_image(self, x)
        grid = [side // step for side, step in zip(x.shape[-2:], self.patch_embed.patch_size, strict=True)]
        x = self.norm_pre(self._pos_embed(self.patch_embed(x))[0])
        if self.rope is None:
            return x
        positions = patch_positions(self.rope, grid, x)
        positions = nn.functional.pad(positions, (0, 0, self.num_prefix_tokens, 0))
        return torch.cat([x, positions.to(x.dtype).expand(x.shape[0], -1, -1)], dim=2)

    def _run_blocks(
        self, x: Tensor, blocks: int | None = None, grids: list[Tensor] | None = None, only_prefix: bool = False
    ) -> Tokens:
        self.dtem.check_blocks(self.blocks, "attn")
        bands = None if self.rope is None else frequency_bands(self.rope, x.device)
        split_block = functools.partial(_split, self.embed_dim, self.num_prefix_tokens, bands)

        def add_grid(tokens: Tokens) -> None:
            assert grids is not None
            grids.append(full_grid(self._features(tokens), self.num_prefix_tokens))

        on_block = None if grids is None else add_grid
        tokens = run_blocks(
            self.dtem, x, self.blocks[:blocks], split_block, self.grad_checkpointing, on_block, only_prefix
        )
        return self._features(tokens)

    def _features(self, tokens: Tokens) -> Tokens:
        return tokens.replace(x=tokens.x[..., : self.embed_dim])


def frequency_bands(rope: Any, device: torch.device) -> Tensor:
    """Angle per unit of position, by channel."""
    if rope.bands is not None:
        return rope.bands
    if rope.in_pixels:
        return pixel_freq_bands(rope.dim // 4, float(rope.max_res), linear_bands=rope.linear_bands).to(device)
    return freq_bands(rope.dim // 4, temperature=rope.temperature, step=1).to(device)


def patch_positions(rope: Any, shape: list[int], like: Tensor) -> Tensor:
    """Row and column of every patch, in the units of the host's angles, (p, 2)."""
    names = ("in_pixels", "ref_feat_shape", "grid_offset", "grid_indexing")  # not all in older versions of timm
    settings = {name: getattr(rope, name) for name in names if hasattr(rope, name)}
    bands = torch.ones(1, device=like.device)
    return build_fourier_pos_embed(shape, bands=bands, include_grid=True, **settings)[0].reshape(-1, POSITION)


def rotations(position: Tensor, bands: Tensor, half: bool) -> Tensor:
    """Sines and cosines for tokens at positions (b, n, 2), in the layout of timm: (b, 1, n, 2 e)."""
    angle = (position.unsqueeze(-1).float() * bands.float()).flatten(2)
    angle = torch.cat([angle, angle], dim=-1) if half else angle.repeat_interleave(2, dim=-1)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).unsqueeze(1)


def _split(width: int, prefix: int, bands: Tensor | None, block: Any) -> tuple[Attention, Mlp]:
    return functools.partial(_attention, width, prefix, bands, block), functools.partial(_mlp, width, block)


def _attention(
    width: int, prefix: int, bands: Tensor | None, block: Any, x: Tensor, bias: Tensor | None
) -> tuple[Tensor, Taps]:
    """Attention with its residual added. Methods get keys and queries before the rotation."""
    features, position = x[..., :width], x[..., width:]
    post_norm = isinstance(block, EvaBlockPostNorm)
    h = features if post_norm else block.norm1(features)
    attn = block.attn
    q, k, v = _project(attn, h)
    q, k = attn.q_norm(q), attn.k_norm(k)
    taps = Taps(h, q, k, v, attn.scale)
    if bands is not None:
        half = getattr(attn, "rotate_half", False)
        angles = rotations(position[:, prefix:], bands, half)
        options = (half,) if half else ()  # timm 1.0.16 has no such option
        q, k = (
            torch.cat([part[:, :, :prefix], apply_rot_embed_cat(part[:, :, prefix:], angles, *options)], dim=2).type_as(
                v
            )
            for part in (q, k)
        )
    y = ops.attend(q, k, v, bias, attn.scale, attn.attn_drop.p if attn.training else 0.0)
    y = attn.norm(y.transpose(1, 2).reshape(h.shape))
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(h).sigmoid()
    y = attn.proj_drop(attn.proj(y))
    y = block.norm1(y) if post_norm else _scaled(block.gamma_1, y)
    return torch.cat([features + block.drop_path1(y), position], dim=-1), taps


def _mlp(width: int, block: Any, x: Tensor) -> Tensor:
    features, position = x[..., :width], x[..., width:]
    if isinstance(block, EvaBlockPostNorm):
        y = block.norm2(block.mlp(features))
    else:
        y = _scaled(block.gamma_2, block.mlp(block.norm2(features)))
    return torch.cat([features + block.drop_path2(y), position], dim=-1)


def _scaled(gamma: Tensor | None, y: Tensor) -> Tensor:
    return y if gamma is None else gamma * y


def _check_direct(attn: Any, h: Tensor) -> None:
    """EVA's attention has biases beside its qkv layer, and reads the weights of both itself."""
    if not isinstance(attn.qkv.weight, Tensor):
        raise DtemError("EVA's attention reads the weights of qkv itself: leave attn.qkv out of quantising")
    if attn.q_bias.is_meta and not h.is_meta:
        raise DtemError(
            "EVA's attention is offloaded (accelerate), and its own biases are not loaded while tokens are merged: "
            "keep the model on its device, or set handle.r = 0"
        )


def _project(attn: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (b, h, n, e)."""
    heads = (attn.num_heads, -1)
    if attn.qkv is None:
        q, k, v = (part(h).unflatten(-1, heads).transpose(1, 2) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        return q, k, v
    if attn.q_bias is None:
        qkv = attn.qkv(h)
    else:
        _check_direct(attn, h)
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        qkv = nn.functional.linear(h, attn.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
