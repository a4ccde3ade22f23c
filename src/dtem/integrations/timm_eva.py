"""timm's Eva: EVA and EVA-02, DINOv3, ViTs with rotary positions (axial and mixed), Perception Encoder.

Their rotary embeddings (RoPE) turn queries and keys by angles that are linear in row and column of a patch, so that
positions travel with tokens (`rotary`). Before the first merge this is the host's own embedding.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.layers import pos_embed_sincos
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, freq_bands, pixel_freq_bands
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.integrations.base import Attention, Mlp, linear_weights, run_blocks
from dtem.integrations.rotary import Rotary, with_positions
from dtem.integrations.timm_vit import Merging, TimmVit, check_image, full_grid
from dtem.types import Taps, Tokens

MIXED = getattr(pos_embed_sincos, "RotaryEmbeddingMixed", None)
DINOV3 = getattr(pos_embed_sincos, "RotaryEmbeddingDinoV3", None)
"""Rotary embeddings that not every version of timm has."""
Block = tuple[Any, Rotary | None]
"""A block of the host, and its angles."""


class TimmEva(TimmVit):
    """Integration of timm's Eva."""

    family: ClassVar[str] = "timm_eva"
    supported: ClassVar[str] = (
        "timm Eva models: EVA and EVA-02 (eva_*, eva02_*), DINOv3 (vit_*_dinov3), vit_*_rope_*, Perception Encoder "
        "(vit_pe_*), with dtem and tome"
    )
    shortcuts: ClassVar[bool] = False
    methods: ClassVar[frozenset[str] | None] = frozenset({"dtem", "tome"})

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, Eva):
            return ""
        if type(model) is not Eva:
            return "it is a subclass of timm's Eva with a forward of its own"
        for layer, block in enumerate(model.blocks):
            if type(block) not in (EvaBlock, EvaBlockPostNorm) or type(block.attn) not in (
                EvaAttention,
                AttentionRope,
            ):
                return f"block {layer} has a {type(block.attn).__name__}, not EVA's own attention"
        if model.rope is not None and type(model.rope) not in (RotaryEmbeddingCat, MIXED, DINOV3):
            return (
                f"its rotary embedding {type(model.rope).__name__} is not known to be linear in the patch position, so "
                "merged tokens have no angles"
            )
        if model.patch_drop is not None:
            return "patch_drop_rate is not supported; build it without"
        known = model.attn_pool is not None or model.global_pool in ("token", "avg", "")
        return None if known else f"global_pool = {model.global_pool!r}"

    def attach(self, model: Any, merger: Any) -> None:
        model.dtem = merger
        model.__class__ = MergingEva

    def class_token(self, model: Any) -> bool:
        return model.cls_token is not None

    @torch.no_grad()
    def head_mean_keys(self, attn: Any) -> tuple[Tensor, Tensor | None]:
        if attn.qkv is None:
            weight, bias = linear_weights(attn.k_proj)
        else:
            weight, bias = linear_weights(attn.qkv)
            weight, bias = weight.chunk(3)[1], None if bias is None else bias.chunk(3)[1]
            bias = bias if getattr(attn, "q_bias", None) is None else attn.k_bias
        heads = (getattr(attn, "num_kv_heads", attn.num_heads), -1)
        return weight.unflatten(0, heads).mean(dim=0), None if bias is None else bias.unflatten(0, heads).mean(dim=0)


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
        grid = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        if self.rope is None:
            return self.norm_pre(self._pos_embed(self.patch_embed(x))[0])
        x = self.patch_embed(x)
        angles = rotaries(self, grid)
        x = with_positions(self.norm_pre(self._pos_embed(x)[0]), grid, self.num_prefix_tokens)
        x.dtem_rotaries = angles  # type: ignore[attr-defined]
        return x

    def _run_blocks(
        self, x: Any, blocks: int | None = None, grids: list[Tensor] | None = None, only_prefix: bool = False
    ) -> Tokens:
        self.dtem.check_blocks(self.blocks, "attn")
        angles = [None] * len(self.blocks) if self.rope is None else x.dtem_rotaries
        split_block = functools.partial(_split, self.embed_dim, self.num_prefix_tokens)

        def add_grid(tokens: Tokens) -> None:
            assert grids is not None
            grids.append(full_grid(self._features(tokens), self.num_prefix_tokens))

        on_block = None if grids is None else add_grid
        pairs = list(zip(self.blocks, angles, strict=True))[:blocks]
        checkpointing = self.grad_checkpointing
        return self._features(run_blocks(self.dtem, x, pairs, split_block, checkpointing, on_block, only_prefix))

    def _features(self, tokens: Tokens) -> Tokens:
        return tokens.replace(x=tokens.x[..., : self.embed_dim])


def rotaries(model: Any, grid: Sequence[int]) -> list[Rotary]:
    """The angles of every block for a grid of patches, in float32 whatever the precision of the host."""
    rope, device = model.rope, model.patch_embed.proj.weight.device
    column_first = getattr(rope, "grid_indexing", "ij") == "xy"
    if MIXED is not None and isinstance(rope, MIXED):
        row, column = rope.freqs.float().flip(0) if column_first else rope.freqs.float()  # (depth, h, e)
        return [Rotary(torch.zeros_like(a), a, b, half=False) for a, b in zip(row, column, strict=True)]
    half = getattr(model.blocks[0].attn, "rotate_half", False)
    starts, steps = _coordinates(rope, grid)
    if isinstance(rope, RotaryEmbeddingCat):
        if rope.in_pixels:
            bands = pixel_freq_bands(rope.dim // 4, float(rope.max_res), linear_bands=rope.linear_bands)
        else:
            bands = freq_bands(rope.dim // 4, temperature=rope.temperature, step=1)
    else:
        bands = 2 * math.pi / rope._compute_periods()
        return [Rotary.axial(bands.to(device), *_augmented(rope, starts, steps), half)] * len(model.blocks)
    return [Rotary.axial(bands.to(device), starts, steps, half, column_first)] * len(model.blocks)


def _coordinates(rope: Any, grid: Sequence[int]) -> tuple[list[float], list[float]]:
    """The host's coordinates of the first row and the first column, and those of the next, relative to these."""
    offset = getattr(rope, "grid_offset", 0.0)
    if not isinstance(rope, RotaryEmbeddingCat):  # DINOv3: centres of patches, from −1 to 1
        sides = {"max": [max(grid)] * 2, "min": [min(grid)] * 2}.get(rope.normalize_coords, grid)
        return [2 * (0.5 + offset) / side - 1 for side in sides], [2 / side for side in sides]
    if rope.in_pixels:
        starts, steps = [-1.0, -1.0], [2 / max(side - 1, 1) for side in grid]
    else:
        starts, steps = [offset, offset], [1.0, 1.0]
    if rope.ref_feat_shape is None:
        return starts, steps
    ratios = [wanted / side for wanted, side in zip(rope.ref_feat_shape, grid, strict=True)]
    return [a * ratio for a, ratio in zip(starts, ratios, strict=True)], [
        a * ratio for a, ratio in zip(steps, ratios, strict=True)
    ]


def _augmented(rope: Any, starts: Sequence[float], steps: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The coordinates as the host is going to shift and scale them at random in this forward (in training)."""
    first = torch.tensor(starts)
    both = torch.stack([first, first + torch.tensor(steps)])
    if rope.training and rope.aug_active:
        with torch.random.fork_rng(devices=[]):  # the host draws the same numbers, on the CPU, right after
            both = rope._apply_coord_augs(both)
    return both[0].to(rope.periods.device), (both[1] - both[0]).to(rope.periods.device)


def _split(width: int, prefix: int, block: Block) -> tuple[Attention, Mlp]:
    return functools.partial(_attention, width, prefix, block), functools.partial(_mlp, width, block[0])


def _attention(width: int, prefix: int, pair: Block, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """Attention with its residual added. Methods get keys and queries before the rotation."""
    block, rotary = pair
    features, position = x[..., :width], x[..., width:]
    post_norm = isinstance(block, EvaBlockPostNorm)
    h = features if post_norm else block.norm1(features)
    attn = block.attn
    q, k, v = _project(attn, h)
    q, k = attn.q_norm(q), attn.k_norm(k)
    taps = Taps(h, q, k, v, attn.scale)
    if rotary is not None:
        q, k = rotary.rotate(q.to(v), k.to(v), position, prefix)
    if (groups := q.shape[1] // k.shape[1]) > 1:  # grouped queries share keys and values
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    y = ops.attend(q.to(v), k.to(v), v, bias, attn.scale, attn.attn_drop.p if attn.training else 0.0)
    y = attn.norm(y.transpose(1, 2).flatten(2))
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
    """Queries (b, h, n, e), keys and values."""
    if attn.qkv is None:
        heads = (attn.num_heads, *[getattr(attn, "num_kv_heads", attn.num_heads)] * 2)
        parts = zip((attn.q_proj, attn.k_proj, attn.v_proj), heads, strict=True)
        q, k, v = (project(h).unflatten(-1, (count, -1)).transpose(1, 2) for project, count in parts)
        return q, k, v
    if getattr(attn, "q_bias", None) is None:
        qkv = attn.qkv(h)
    else:
        _check_direct(attn, h)
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        qkv = nn.functional.linear(h, attn.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v
