"""timm's VisionTransformer: DeiT, DeiT-III, AugReg, MAE, DINOv2 (registers), CLIP and SigLIP towers, LV-ViT, …

Patching changes the model's class to a subclass that runs the host's own blocks and submodules with token reduction.
Weights and state-dict keys stay the same; if no block reduces tokens, the host's own forward runs.
"""

import functools
from typing import Any, ClassVar

import torch
from timm.layers.attention import Attention as TimmAttention
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.integrations import affine, cpu_workspace, fast_block
from dtem.integrations.base import Attention, Integration, Merger, Mlp, linear_weights, run_blocks
from dtem.integrations.timm_block import attention, has_plain_qkv, last_attention, mlp
from dtem.methods.affine import find_affine
from dtem.methods.base import MASKED, check_soft_pooling, full_size
from dtem.models.lvvit import LvVit
from dtem.types import HostSpec, Tokens

POOLING = {
    "token": "prefix",
    "avg": "mean",
    "avgmax": "avgmax",
    "max": "max",
    "map": "attention",
    "": "none",
    "token+max": "prefix+max",
}


class TimmVit(Integration):
    """Integration of timm's VisionTransformer and VisionTransformerDistilled."""

    family: ClassVar[str] = "timm_vit"
    provides: ClassVar[frozenset[str]] = frozenset({"input", "q", "k", "v", "key_projection"})
    supported: ClassVar[str] = (
        "timm VisionTransformer models made of plain blocks (deit_*, deit3_*, vit_* including AugReg, MAE, DINO, "
        "DINOv2 with registers, CLIP and SigLIP towers, lvvit_s of dtem.models)"
    )

    shortcuts: ClassVar[bool] = True

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, VisionTransformer):
            return ""
        if type(model) not in _MERGED:
            return f"it is a subclass of timm's {type(model).__mro__[1].__name__} with a forward of its own"
        for layer, block in enumerate(model.blocks):
            if type(block) is not Block or type(block.attn) is not TimmAttention:
                kind = type(block).__name__ if type(block) is not Block else type(block.attn).__name__
                return f"block {layer} is a {kind}, not timm's plain Block with Attention"
        if model.global_pool not in POOLING:
            return f"global_pool = {model.global_pool!r} cannot weight tokens by size"
        return None

    def describe(self, model: Any) -> HostSpec:
        attn = model.blocks[0].attn
        config: dict[str, Any] = (
            model.pretrained_cfg if isinstance(getattr(model, "pretrained_cfg", None), dict) else {}
        )
        embed = model.patch_embed
        norms, biases = find_affine(model, ("blocks", "norm", "fc_norm"))
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
            num_merge_blocks=3 * len(model.blocks) // 4 if isinstance(model, LvVit) else None,
            norms=norms,
            biases=biases,
        )

    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        return [self.head_mean_keys(block.attn) for block in model.blocks]

    def class_token(self, model: Any) -> bool:
        """Whether the first prefix token is a class token."""
        return model.has_class_token

    @torch.no_grad()
    def head_mean_keys(self, attn: Any) -> tuple[Tensor, Tensor | None]:
        """The head-mean of the key projection of one attention."""
        heads = (3, attn.num_heads, attn.head_dim)
        weight, bias = linear_weights(attn.qkv)
        return (
            weight.unflatten(0, heads)[1].mean(dim=0),
            None if bias is None else bias.unflatten(0, heads)[1].mean(dim=0),
        )

    def attach(self, model: Any, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = _MERGED[type(model)]

    def detach(self, model: Any) -> None:
        model.__class__ = host_class(model)
        del model.dtem


def host_class(model: Any) -> type:
    """The class of a patched model before it was patched."""
    kinds = type(model).__mro__
    if not issubclass(Merging, kinds[1]):
        raise DtemError(f"{kinds[0].__name__} was changed after patching (fully_shard, …), so it cannot be unpatched")
    return kinds[2]


class Merging:
    """Mixin of the patched classes. `self` is a VisionTransformer with a `dtem` submodule."""

    dtem: Merger

    def forward(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
        """As the host's, with token reduction."""
        affine.rebind(self)
        shortcut = self.dtem.shortcut and self.dtem.method.host.pooling == "prefix" and self.dtem.trace is None
        if shortcut and self.dtem.active and has_plain_qkv(self.blocks[-1].attn):
            method, prefix = self.dtem.method, self.num_prefix_tokens
            layer, last = len(self.blocks) - 1, self.blocks[-1]
            x = self._embed(x, **kwargs)
            r = self.dtem.plan(x.shape[1] - prefix)[layer]
            tokens = method.before(layer, self._run_blocks(x, blocks=layer), r)
            self.dtem.finish(tokens)
            x = mlp(last, last_attention(last, prefix, tokens.x, method.bias(tokens)))
            return self.forward_head(self.norm(x))
        if self.dtem.active and self.dtem.method.merges_only and self.dtem.method.host.pooling == "prefix":
            tokens = self._run_blocks(self._embed(x, **kwargs), only_prefix=True)
            self.dtem.finish(tokens)
            return self.forward_head(self.norm(tokens.x))
        host: Any = super()
        return host.forward(x, **kwargs)

    def forward_features(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
        """Features of the remaining tokens, which carry their sizes (`dtem_size`) to `forward_head`."""
        if not self.dtem.active and self.dtem.trace is None:
            check_image(self, x)
            host: Any = super()
            return host.forward_features(x, **kwargs)
        tokens = self._run_blocks(self._embed(x, **kwargs))
        self.dtem.finish(tokens)
        features = self.norm(tokens.x)
        if self.dtem.method.host.pooling != "prefix":
            features.dtem_size = self._pooling_sizes(tokens)
        return features

    def reset_classifier(self: Any, *args: Any, **kwargs: Any) -> None:
        """As the host's; the pooling may change."""
        pooling = kwargs.get("global_pool", args[1] if len(args) > 1 else None)
        if self.dtem.method.soft and pooling is not None:
            check_soft_pooling(POOLING.get(pooling, ""))
        host: Any = super()
        host.reset_classifier(*args, **kwargs)
        pooling = POOLING["map" if self.attn_pool is not None else self.global_pool]
        self.dtem.change_host(self, pooling=pooling)

    def set_input_size(self: Any, *args: Any, **kwargs: Any) -> None:
        """As the host's; the number of patches changes, and with it what r may be."""
        host: Any = super()
        host.set_input_size(*args, **kwargs)
        embed = self.patch_embed
        self.dtem.change_host(self, patches=embed.num_patches, image=(channels(self), *embed.img_size))

    def forward_intermediates(
        self: Any,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As the host's, on the full grid: every merged patch has the features of its token."""
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
            host: Any = super()
            return host.forward_intermediates(x, **options, **kwargs)
        if self.dtem.method.soft:
            raise DtemError("intermediate features exist for hard merging only; set handle.mode = 'hard' first")
        if not self.dtem.method.conserves_size:
            raise DtemError(
                f"method {self.dtem.method.name!r} drops patches, so the full grid of intermediate features is not "
                "defined; use a method that merges, or set handle.r = 0"
            )
        options["indices"], last = feature_take_indices(len(self.blocks), indices)
        grids: list[Tensor] = []
        self._run_blocks(self._embed(x, **kwargs), blocks=last + 1 if stop_early else None, grids=grids)
        return _replay(self, x, grids, options)

    def pool(self: Any, x: Tensor, pool_type: str | None = None) -> Tensor:
        """As the host's, with tokens weighted by size."""
        kind = "map" if self.attn_pool is not None else self.global_pool if pool_type is None else pool_type
        if not self.dtem.active or kind not in ("avg", "avgmax", "map"):
            host: Any = super()
            return host.pool(x, pool_type)
        size = _sizes(x, kind)
        if not self.pool_include_prefix:
            x, size = x[:, self.num_prefix_tokens :], size[:, self.num_prefix_tokens :]
        if kind == "map":
            bias = self.dtem.method.bias(Tokens(x, size))
            return self.attn_pool(x, attn_mask=None if bias is None else bias[:, None, None, :].to(x.dtype))
        mean = ((size / size.sum(dim=1, keepdim=True)).to(x.dtype).unsqueeze(1) @ x).squeeze(1)
        return mean if kind == "avg" else 0.5 * (x.amax(dim=1) + mean)

    def _pooling_sizes(self: Any, tokens: Tokens) -> Tensor:
        """The sizes that weight tokens in pooling."""
        return full_size(tokens)

    def _embed(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Patch embedding and the host's other steps before its blocks."""
        if attn_mask is not None or is_causal:
            raise DtemError("attn_mask and is_causal cannot be used while tokens are merged; set handle.r = 0")
        check_image(self, x)
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))

    def _run_blocks(
        self: Any, x: Tensor, blocks: int | None = None, grids: list[Tensor] | None = None, only_prefix: bool = False
    ) -> Tokens:
        """Run the first `blocks` blocks (None: all). The full grid after each block is added to `grids`."""
        self.dtem.check_blocks(self.blocks, "attn")
        on_block = None if grids is None else lambda tokens: grids.append(full_grid(tokens, self.num_prefix_tokens))
        steps = split_blocks(self.dtem, list(self.blocks)[:blocks], x)
        return run_blocks(self.dtem, x, steps, lambda step: step, self.grad_checkpointing, on_block, only_prefix)


def split_blocks(merger: Merger, blocks: Any, x: Tensor) -> list[tuple[Attention, Mlp]]:
    """Attention and MLP of every block, each with its residual added."""
    partial = functools.partial
    workspace = cpu_workspace.create(x)
    if workspace is None:
        return [(partial(attention, block), partial(mlp, block)) for block in blocks]
    return [
        (partial(attention, block), partial(mlp, block))
        if fast is None
        else (partial(fast.attention, workspace), partial(fast.mlp, workspace))
        for block, fast in zip(blocks, fast_block.read(merger, blocks), strict=True)
    ]


def full_grid(tokens: Tokens, prefix: int) -> Tensor:
    """Prefix tokens, then every patch with the features of its token."""
    assert tokens.source is not None
    return torch.cat([tokens.x[:, :prefix], ops.unmerge(tokens.x, tokens.source)], dim=1)


def channels(model: Any) -> int:
    """Number of input channels, by the first convolution."""
    return next(module.in_channels for module in model.patch_embed.modules() if isinstance(module, nn.Conv2d))


def check_image(model: Any, x: Tensor) -> None:
    """Refuse an image that the host cannot take, and say how to fix it."""
    embed, wanted_channels = model.patch_embed, channels(model)
    if x.ndim != 4 or x.shape[1] != wanted_channels:
        raise DtemError(f"expected images of shape (batch, {wanted_channels}, height, width), got {tuple(x.shape)}")
    size, wanted = tuple(x.shape[-2:]), tuple(embed.img_size)
    if embed.strict_img_size and size != wanted:
        raise DtemError(
            f"the image is {size[0]}×{size[1]}, the model takes {wanted[0]}×{wanted[1]}: resize it, or build the "
            "model with dynamic_img_size=True (or img_size=…)"
        )
    rest = [side % patch for side, patch in zip(size, embed.patch_size, strict=True)]
    if any(rest) and not embed.dynamic_img_pad:
        raise DtemError(
            f"the image is {size[0]}×{size[1]}, which patches of {embed.patch_size[0]}×{embed.patch_size[1]} do not "
            "divide: resize it, or build the model with dynamic_img_pad=True"
        )


def _sizes(features: Tensor, pool: str) -> Tensor:
    """The token sizes that `forward_features` added to its result."""
    size = getattr(features, "dtem_size", None)
    if size is None:
        raise DtemError(
            f"these features have no token sizes, which global_pool = {pool!r} needs: call model(x), or pass the "
            "result of forward_features to forward_head unchanged"
        )
    return size


class _Replay(nn.Module):
    """Replaces a block whose output is known."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.output


def _replay(model: Any, x: Tensor, grids: list[Tensor], options: dict[str, Any]) -> Any:
    """Let the host's own `forward_intermediates` format the grids after the blocks."""
    stand_in: Any = object.__new__(next(kind for kind in type(model).__mro__ if not issubclass(kind, Merging)))
    stand_in.__dict__ = dict(model.__dict__, _modules=dict(model._modules))
    stand_in.blocks = nn.Sequential(*map(_Replay, grids))
    stand_in.grad_checkpointing = False
    return stand_in.forward_intermediates(x, **options)


class MergingVisionTransformer(Merging, VisionTransformer):  # type: ignore[misc]  # looser signatures, for all timm
    """timm's VisionTransformer, merging."""


class MergingVisionTransformerDistilled(Merging, VisionTransformerDistilled):  # type: ignore[misc]
    """timm's VisionTransformerDistilled, merging."""


class MergingLvVit(Merging, LvVit):  # type: ignore[misc]
    """LV-ViT, merging. All patches of a token have its scores, so the best token is the best patch, and the head needs
    no unmerging. Tokens that inference would not have (excluded ones in soft mode, padding) are ignored.
    """

    def _pooling_sizes(self, tokens: Tokens) -> Tensor:
        size, excluded = full_size(tokens), tokens.excluded
        return nn.functional.pad(size[:, : size.shape[1] - excluded], (0, excluded)) if excluded else size

    def best_patch(self, x: Tensor) -> Tensor:
        """As the host's, over tokens."""
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
