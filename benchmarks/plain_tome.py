"""ToMe as its authors describe and publish it, to be measured against: an explicit attention matrix, a full argsort of
the edges, scatter-reduce for merging, sizes as weights of a mean. Straight and without any of our short cuts."""

from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def plain_tome(model: VisionTransformer, r: int) -> Callable[[Tensor], Tensor]:
    """A forward of `model` (class token, no distillation token) that merges r tokens per block by ToMe."""

    def forward(images: Tensor) -> Tensor:
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        size = None
        for block in model.blocks:
            y, metric = _attention(block.attn, block.norm1(x), size)
            x = x + block.drop_path1(block.ls1(y))
            count = min(r, (x.shape[1] - 1) // 2)
            if count:
                x, size = _merge(x, size, metric, count)
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        return model.forward_head(model.norm(x))

    return forward


def _attention(attn: torch.nn.Module, h: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, width = h.shape
    qkv = attn.qkv(h).reshape(batch, tokens, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    weights = (q * attn.scale) @ k.transpose(-2, -1)
    if size is not None:
        weights = weights + size.log()[:, None, None, :, 0]
    weights = attn.attn_drop(weights.softmax(dim=-1))
    y = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
    return attn.proj_drop(attn.proj(y)), k.mean(1)


def _merge(x: Tensor, size: Tensor | None, metric: Tensor, r: int) -> tuple[Tensor, Tensor]:
    metric = metric / metric.norm(dim=-1, keepdim=True)
    a, b = metric[..., ::2, :], metric[..., 1::2, :]
    scores = a @ b.transpose(-1, -2)
    scores[..., 0, :] = -torch.inf
    best, partner = scores.max(dim=-1)
    edges = best.argsort(dim=-1, descending=True)[..., None]
    kept, gone = edges[..., r:, :].sort(dim=1)[0], edges[..., :r, :]
    into = partner[..., None].gather(dim=-2, index=gone)

    def reduce(values: Tensor) -> Tensor:
        source, target = values[..., ::2, :], values[..., 1::2, :]
        batch, count, width = source.shape
        stay = source.gather(dim=-2, index=kept.expand(batch, count - r, width))
        moved = source.gather(dim=-2, index=gone.expand(batch, r, width))
        target = target.scatter_reduce(-2, into.expand(batch, r, width), moved, reduce="sum")
        return torch.cat([stay, target], dim=1)

    if size is None:
        size = torch.ones_like(x[..., :1])
    merged, new_size = reduce(x * size), reduce(size)
    return merged / new_size, new_size
