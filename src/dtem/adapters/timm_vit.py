"""timm's VisionTransformer: DeiT, DeiT-III, AugReg, MAE, DINOv2 (registers), CLIP and SigLIP towers, LV-ViT, …

The model's class is swapped for a subclass that walks through the host's own blocks and submodules, with token sizes
as local variables. Weights and state-dict keys stay; with nothing to merge, the host's own forward runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from timm.layers import Attention
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from dtem import ops
from dtem.adapters import lean
from dtem.adapters.base import Adapter, Merger, current_trace, finish, walk
from dtem.adapters.images import channels, check_image
from dtem.adapters.lean import Lean
from dtem.adapters.timm_block import attention, last_attention, mlp, splits, usable
from dtem.hosts.lvvit import LvVit
from dtem.methods.base import MASKED, full_size
from dtem.types import DtemError, HostSpec, Tokens

POOLING = {
    "token": "prefix",
    "avg": "mean",
    "avgmax": "avgmax",
    "max": "max",
    "map": "attention",
    "": "none",
    "token+max": "prefix+max",
}


class TimmVit(Adapter):
    """Adapter of timm's VisionTransformer and VisionTransformerDistilled."""

    family: ClassVar[str] = "timm_vit"
    provides: ClassVar[frozenset[str]] = frozenset({"input", "q", "k", "v", "key_projection"})
    supported: ClassVar[str] = (
        "timm VisionTransformer models made of plain blocks (deit_*, deit3_*, vit_* including AugReg, MAE, DINO, "
        "DINOv2 with registers, CLIP and SigLIP towers, lvvit_s of dtem.hosts)"
    )

    shortcuts: ClassVar[bool] = True

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, VisionTransformer):
            return ""
        if type(model) not in _MERGED:
            return f"it is a subclass of timm's {type(model).__mro__[1].__name__} with a forward of its own"
        for layer, block in enumerate(model.blocks):
            if type(block) is not Block or type(block.attn) is not Attention:
                found = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
                return f"block {layer} is a {found}, which has no plain step between attention and MLP"
        if model.global_pool not in POOLING:
            return f"global_pool = {model.global_pool!r} cannot weigh tokens by size"
        return None

    def describe(self, model: VisionTransformer) -> HostSpec:
        attn = model.blocks[0].attn
        config = model.pretrained_cfg if isinstance(getattr(model, "pretrained_cfg", None), dict) else {}
        embed = model.patch_embed
        return HostSpec(
            name=config.get("architecture") or type(model).__name__,
            family=self.family,
            depth=len(model.blocks),
            width=model.embed_dim,
            heads=attn.num_heads,
            head_dim=getattr(attn, "head_dim", model.embed_dim // attn.num_heads),  # EVA of timm 1.0.16 has none
            prefix=model.num_prefix_tokens,
            patches=embed.num_patches,
            pooling=POOLING["map" if model.attn_pool is not None else model.global_pool],
            image=(channels(model), *embed.img_size),
            masked=str(config.get("tag", "")).startswith("mae"),
            class_token=self.class_token(model),
            # As published for LV-ViT-S: 12 of 16.
            merging=3 * len(model.blocks) // 4 if isinstance(model, LvVit) else None,
        )

    def key_projections(self, model: VisionTransformer) -> list[tuple[Tensor, Tensor | None]]:
        return [self.head_mean_keys(block.attn) for block in model.blocks]

    def class_token(self, model: VisionTransformer) -> bool:
        """Whether the first prefix token is one."""
        return model.has_class_token

    @torch.no_grad()
    def head_mean_keys(self, attn: Attention) -> tuple[Tensor, Tensor | None]:
        """Of one attention, the head-mean of the key projection."""
        heads = (3, attn.num_heads, attn.head_dim)
        weight = attn.qkv.weight.unflatten(0, heads)[1].mean(dim=0)
        bias = None if attn.qkv.bias is None else attn.qkv.bias.unflatten(0, heads)[1].mean(dim=0)
        return weight, bias

    def attach(self, model: VisionTransformer, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = _MERGED[type(model)]

    def detach(self, model: VisionTransformer) -> None:
        model.__class__ = type(model).__mro__[2]
        del model.dtem


class Merging:
    """Mixed into the host's class by `attach`. `self` is a VisionTransformer with a `dtem` submodule."""

    dtem: Merger

    def forward(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
        short = self.dtem.shortcut and self.dtem.method.host.pooling == "prefix" and current_trace() is None
        if short and self.dtem.active and splits(self.blocks[-1].attn):
            method, prefix = self.dtem.method, self.num_prefix_tokens
            layer, last = len(self.blocks) - 1, self.blocks[-1]
            x = self._embed(x, **kwargs)
            r = self.dtem.plan(x.shape[1] - prefix)[layer]
            tokens = method.before(layer, self._walk(x, blocks=layer), r)
            finish(method, tokens)
            x = mlp(last, None, last_attention(last, prefix, tokens.x, method.bias(tokens)))
            return self.forward_head(self.norm(x))
        return super().forward(x, **kwargs)

    def forward_features(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
        """Features of the tokens that are left. They carry their sizes to `forward_head`."""
        if not self.dtem.active and current_trace() is None:
            check_image(self, x)
            return super().forward_features(x, **kwargs)
        tokens = self._walk(self._embed(x, **kwargs))
        finish(self.dtem.method, tokens)
        features = self.norm(tokens.x)
        if self.dtem.method.host.pooling != "prefix":
            features.dtem_size = self._counting(tokens)
        return features

    def reset_classifier(self: Any, *args: Any, **kwargs: Any) -> None:
        super().reset_classifier(*args, **kwargs)
        pooling = POOLING["map" if self.attn_pool is not None else self.global_pool]
        self.dtem.method.host = dataclasses.replace(self.dtem.method.host, pooling=pooling)

    def forward_intermediates(
        self: Any,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As the host's, on the full grid: every merged patch gets a copy of the token that holds it."""
        options: dict[str, Any] = {
            "indices": indices,
            "return_prefix_tokens": return_prefix_tokens,
            "norm": norm,
            "stop_early": stop_early,
            "output_fmt": output_fmt,
            "intermediates_only": intermediates_only,
        }
        if output_dict:
            options["output_dict"] = True
        if not self.dtem.active:
            check_image(self, x)
            return super().forward_intermediates(x, **options, **kwargs)
        if self.dtem.method.soft:
            raise DtemError("intermediate grids exist for hard merging only; set handle.mode = 'hard' first")
        if not self.dtem.method.keeps_mass:
            raise DtemError(
                f"method {self.dtem.method.name!r} drops patches here, so there are no whole intermediate grids; use a "
                "method that merges, or set handle.r = 0"
            )
        options["indices"], last = feature_take_indices(len(self.blocks), indices)
        states: list[Tensor] = []
        self._walk(self._embed(x, **kwargs), blocks=last + 1 if stop_early else None, grids=states)
        return _replay(self, x, states, options)

    def pool(self: Any, x: Tensor, pool_type: str | None = None) -> Tensor:
        kind = "map" if self.attn_pool is not None else self.global_pool if pool_type is None else pool_type
        if not self.dtem.active or kind not in ("avg", "avgmax", "map"):
            return super().pool(x, pool_type)
        size = _sizes(x, kind)
        if not self.pool_include_prefix:
            x, size = x[:, self.num_prefix_tokens :], size[:, self.num_prefix_tokens :]
        if kind == "map":
            bias = self.dtem.method.bias(Tokens(x, size))
            return self.attn_pool(x, attn_mask=None if bias is None else bias[:, None, None, :].to(x.dtype))
        mean = ((size / size.sum(dim=1, keepdim=True)).to(x.dtype).unsqueeze(1) @ x).squeeze(1)
        return mean if kind == "avg" else 0.5 * (x.amax(dim=1) + mean)

    def _counting(self: Any, tokens: Tokens) -> Tensor:
        """The sizes by which the head weighs tokens."""
        return full_size(tokens)

    def _embed(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Image to tokens, by the host's own steps before its blocks."""
        if attn_mask is not None or is_causal:
            raise DtemError("attn_mask and is_causal cannot be used while tokens are merged; set handle.r = 0")
        check_image(self, x)
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))

    def _walk(self: Any, x: Tensor, blocks: int | None = None, grids: list[Tensor] | None = None) -> Tokens:
        """Tokens through the first `blocks` blocks (all by default), merging on the way; their full grids go into
        `grids`."""
        memory = lean.begin(x)
        seen = None if grids is None else lambda tokens: grids.append(grid(tokens, self.num_prefix_tokens))
        return walk(
            self.dtem, x, self.blocks[:blocks], functools.partial(_halves, memory), self.grad_checkpointing, seen
        )


def _halves(memory: Lean | None, block: Block) -> tuple[Callable[..., Any], Callable[..., Any]]:
    space = usable(block, memory)
    return functools.partial(attention, block, space), functools.partial(mlp, block, space)


def grid(tokens: Tokens, prefix: int) -> Tensor:
    """Every patch in its place again, behind the prefix."""
    return torch.cat([tokens.x[:, :prefix], ops.unmerge(tokens.x, tokens.source)], dim=1)


def _sizes(features: Tensor, pool: str) -> Tensor:
    """What `forward_features` said of the tokens."""
    size = getattr(features, "dtem_size", None)
    if size is None:
        raise DtemError(
            f"these features carry no token sizes, and global_pool = {pool!r} goes by them: "
            "call model(x), or hand what forward_features returned to forward_head unchanged"
        )
    return size


class _Replay(nn.Module):
    """Stands in for a block whose output is known already."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.state


def _replay(model: Any, x: Tensor, states: list[Tensor], options: dict[str, Any]) -> Any:
    """Let the host's own `forward_intermediates` format states that were computed by merging blocks."""
    stand_in = object.__new__(type(model).__mro__[2])
    stand_in.__dict__ = dict(model.__dict__, _modules=dict(model._modules))
    stand_in.blocks = nn.Sequential(*map(_Replay, states))
    stand_in.grad_checkpointing = False
    return stand_in.forward_intermediates(x, **options)


class MergingVisionTransformer(Merging, VisionTransformer):
    """timm's VisionTransformer, merging."""


class MergingVisionTransformerDistilled(Merging, VisionTransformerDistilled):
    """timm's VisionTransformerDistilled, merging."""


class MergingLvVit(Merging, LvVit):
    """LV-ViT, merging. Copies of a token have its scores, so the best merged token is the best patch: nothing needs to
    be unmerged for the head. What inference would not have (in soft mode, tokens merged away; padding) is passed over.
    """

    def _counting(self, tokens: Tokens) -> Tensor:
        size, gone = full_size(tokens), tokens.excluded
        return nn.functional.pad(size[:, : size.shape[1] - gone], (0, gone)) if gone else size

    def best_patch(self, x: Tensor) -> Tensor:
        if not self.dtem.active:
            return super().best_patch(x)
        prefix = self.num_prefix_tokens
        empty = _sizes(x, self.global_pool)[:, prefix:] < 2 * MASKED
        return self.aux_head(x[:, prefix:]).masked_fill(empty.unsqueeze(-1), -torch.inf).amax(dim=1)


_MERGED = {
    VisionTransformer: MergingVisionTransformer,
    VisionTransformerDistilled: MergingVisionTransformerDistilled,
    LvVit: MergingLvVit,
}
