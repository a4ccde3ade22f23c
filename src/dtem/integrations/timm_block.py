"""Attention and MLP of timm's Block, run through the host's own submodules (on a CPU plain blocks: `fast_block`).

`attention` and `mlp` take x and return it with the residual added; `attention_branch` and `mlp_branch` take the
normalised input and return the residual branch alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dtem import ops
from dtem.integrations import cpu_workspace
from dtem.types import Taps

Block = Any
"""timm.models.vision_transformer.Block"""
Attention = Any
"""timm.layers.Attention"""


def attention(block: Block, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """Attention of the block, with its residual added."""
    if ops.is_fused_merge() and _is_plain(block.attn):
        y, taps = _attention_for_export(block.attn, block.norm1(x), bias)
        return x + _chain((block.attn.proj_drop, block.ls1, block.drop_path1), y), taps
    y, taps = _head_outputs(block.attn, block.norm1(x), bias)
    return _project_heads(block, x, taps.input, y), taps


def attention_branch(block: Block, h: Tensor, bias: Tensor | None) -> Tensor:
    """The residual branch of attention, without x."""
    y, _ = _head_outputs(block.attn, h, bias)
    return _project_heads(block, None, h, y)


def _head_outputs(attn: Attention, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """Concatenated head outputs, (b, n, c)."""
    batch, count, _ = h.shape
    q, k, v = attn.qkv(h).view(batch, count, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = _call(attn.q_norm, q), _call(attn.k_norm, k)
    y = ops.attend(q, k, v, bias, attn.scale, _dropout(attn)).transpose(1, 2).flatten(2)
    return y, Taps(h, q, k, v, attn.scale)


def _attention_for_export(attn: Attention, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """Projected attention output in a form for exported graphs, with fewer passes over memory.

    Tokens are the first dimension, so that heads are moved to the front by the products (onnxruntime fuses a transpose
    of the first dimension into them) instead of by copies. The key bias adds a constant to all logits of a query, and
    the value bias passes through the weighted mean: the former is left out, the latter is added to the projection bias.
    """
    batch, count, _ = h.shape
    linear, width = nn.functional.linear, attn.num_heads * attn.head_dim
    parts = [slice(start, start + width) for start in range(0, 3 * width, width)]
    q_bias, k_bias, v_bias = (None if attn.qkv.bias is None else attn.qkv.bias[part] for part in parts)

    def heads(part: slice, added: Tensor | None) -> Tensor:
        y = linear(h.transpose(0, 1), attn.qkv.weight[part], added)
        return y.view(count, batch, attn.num_heads, attn.head_dim).permute(1, 2, 0, 3)

    q, k, v = (heads(part, added) for part, added in zip(parts, (q_bias, None, None), strict=True))
    taps, proj_bias = Taps(h, q, k, v, attn.scale), attn.proj.bias
    if k_bias is not None and v_bias is not None:
        biased_k, biased_v = (y + part.view(attn.num_heads, 1, -1) for y, part in ((k, k_bias), (v, v_bias)))
        taps, proj_bias = taps._replace(k=biased_k, v=biased_v), linear(v_bias, attn.proj.weight, attn.proj.bias)
    y = ops.attend(q, k, v, bias, attn.scale).transpose(1, 2).flatten(2)
    return linear(y, attn.proj.weight, proj_bias), taps


def _is_plain(attn: Attention) -> bool:
    """Whether attention consists of plain linear layers and heads, without norms or gates."""
    norms = (attn.q_norm, attn.k_norm, attn.norm)
    return (
        all(map(cpu_workspace.is_identity, norms))
        and getattr(attn, "gate", None) is None
        and has_plain_qkv(attn)
        and cpu_workspace.is_plain_linear(attn.proj)
    )


def has_plain_qkv(attn: Attention) -> bool:
    """Whether the weights of q, k and v can be used separately: the layer is no wrapper (LoRA, …) and has no hooks."""
    return cpu_workspace.is_plain_linear(attn.qkv)


def last_attention(block: Block, prefix: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """Attention for the prefix tokens only, with the residual added: all that a class-token head needs."""
    attn = block.attn
    h = block.norm1(x)
    head_outputs = _absorbed_head_outputs if _is_plain(attn) and not _dropout(attn) else _prefix_head_outputs
    y = head_outputs(attn, prefix, h, bias).transpose(1, 2).flatten(2)
    return _project_heads(block, x[:, :prefix], h[:, :prefix], y)


def _prefix_head_outputs(attn: Attention, prefix: int, h: Tensor, bias: Tensor | None) -> Tensor:
    """Head outputs for the prefix tokens, (b, h, prefix, d)."""
    batch, count, _ = h.shape
    split = attn.num_heads * attn.head_dim
    weight, qkv_bias = attn.qkv.weight, attn.qkv.bias
    q_bias, kv_bias = (None, None) if qkv_bias is None else (qkv_bias[:split], qkv_bias[split:])
    q = nn.functional.linear(h[:, :prefix], weight[:split], q_bias)
    kv = nn.functional.linear(h, weight[split:], kv_bias)
    q = q.view(batch, prefix, attn.num_heads, attn.head_dim).transpose(1, 2)
    k, v = kv.view(batch, count, 2, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return ops.attend(attn.q_norm(q), attn.k_norm(k), v, bias, attn.scale, _dropout(attn))


def _absorbed_head_outputs(attn: Attention, prefix: int, h: Tensor, bias: Tensor | None) -> Tensor:
    """`_prefix_head_outputs` without computing keys and values: q (h Wk)ᵀ = (q Wkᵀ) hᵀ and p (h Wv) = (p h) Wv. The key
    bias adds a constant to all logits of a query, so it is left out."""
    batch, _, width = h.shape
    heads, split = attn.num_heads, attn.num_heads * attn.head_dim
    q_bias, v_bias = (None, None) if attn.qkv.bias is None else (attn.qkv.bias[:split], attn.qkv.bias[2 * split :])
    k_weight, v_weight = attn.qkv.weight[split:].view(2, heads, attn.head_dim, width).unbind(0)
    q = nn.functional.linear(h[:, :prefix], attn.qkv.weight[:split], q_bias)
    queries = q.view(batch * prefix, heads, attn.head_dim).transpose(0, 1) @ k_weight
    queries = queries.view(heads, batch, prefix, width).transpose(0, 1).flatten(1, 2).unsqueeze(1)
    mixed = ops.attend(queries, h.unsqueeze(1), h.unsqueeze(1), bias, attn.scale)
    mixed = mixed.view(batch, heads, prefix, width).transpose(0, 1).flatten(1, 2)
    y = (mixed @ v_weight.transpose(1, 2)).view(heads, batch, prefix, attn.head_dim).transpose(0, 1)
    return y if v_bias is None else y + v_bias.view(heads, 1, -1)


def _project_heads(block: Block, x: Tensor | None, h: Tensor, y: Tensor) -> Tensor:
    """Inner norm and gate (if any), projection, layer scale and drop path, and the residual if x is given."""
    attn = block.attn
    y = _call(attn.norm, y)
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(h).sigmoid()
    after = (attn.proj_drop, block.ls1, block.drop_path1)
    return _plus(x, _chain(after, attn.proj(y)))


def mlp(block: Block, x: Tensor) -> Tensor:
    """MLP of the block, with its residual added."""
    return _mlp(block, x, block.norm2(x))


def mlp_branch(block: Block, h: Tensor) -> Tensor:
    """The residual branch of the MLP, without x."""
    return _mlp(block, None, h)


def _mlp(block: Block, x: Tensor | None, h: Tensor) -> Tensor:
    return _plus(x, _chain((block.ls2, block.drop_path2), block.mlp(h)))


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return x if cpu_workspace.is_identity(module) else module(x)


def _chain(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    return functools.reduce(lambda x, module: _call(module, x), modules, x)


def _dropout(attn: Attention) -> float:
    return attn.attn_drop.p if attn.training else 0.0
