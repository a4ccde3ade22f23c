"""The two halves of timm's plain block, through the host's own submodules.

`attention` and `mlp` take x and give it back with the residual added; `attention_alone` and `mlp_alone` take what
is normalised already, and leave the residual to the caller.
"""

import functools
from collections.abc import Sequence

from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dtem import ops
from dtem.adapters import lean
from dtem.adapters.lean import Lean
from dtem.types import Taps


def attention(block: Block, space: Lean | None, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """The block's attention half."""
    if ops.is_whole() and _plain_heads(block.attn):
        y, taps = _turned_heads(block.attn, block.norm1(x), bias)
        return x + _chain((block.attn.proj_drop, block.ls1, block.drop_path1), y), taps
    y, taps = _heads(block.attn, space, block.norm1(x), bias)
    return _after_heads(block, space, x, taps.input, y), taps


def attention_alone(block: Block, space: Lean | None, h: Tensor, bias: Tensor | None) -> Tensor:
    """What attention adds to the residual."""
    y, _ = _heads(block.attn, space, h, bias)
    return _after_heads(block, space, None, h, y)


def _heads(attn: Attention, space: Lean | None, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """What the heads say, side by side."""
    batch, count, _ = h.shape
    qkv = attn.qkv(h) if space is None else space.linear(attn.qkv, h)
    q, k, v = qkv.view(batch, count, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = _call(attn.q_norm, q), _call(attn.k_norm, k)
    y = ops.attend(q, k, v, bias, attn.scale, _dropout(attn)).transpose(1, 2).flatten(2)
    return y, Taps(h, q, k, v, attn.scale)


def _turned_heads(attn: Attention, h: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    """What attention says, as graphs for other runtimes hold it: with fewer passes over memory.

    Tokens come first, so that heads are brought to the front by the products themselves (onnxruntime fuses a move of
    the first dimension into them) instead of by copies. The bias of the keys adds the same to all logits of a query,
    and that of the values goes through a mean unchanged, so neither needs a pass: the second joins the projection's.
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
        whole_k, whole_v = (y + part.view(attn.num_heads, 1, -1) for y, part in ((k, k_bias), (v, v_bias)))
        taps, proj_bias = taps._replace(k=whole_k, v=whole_v), linear(v_bias, attn.proj.weight, attn.proj.bias)
    y = ops.attend(q, k, v, bias, attn.scale).transpose(1, 2).flatten(2)
    return linear(y, attn.proj.weight, proj_bias), taps


def _plain_heads(attn: Attention) -> bool:
    """Whether nothing stands between the linear layers and the heads, and these are no more than that."""
    between = (attn.q_norm, attn.k_norm, attn.norm)
    return all(map(lean.idle, between)) and getattr(attn, "gate", None) is None and splits(attn) and _linear(attn.proj)


def splits(attn: Attention) -> bool:
    """Whether the weights of queries, keys and values can be used apart: a layer that was wrapped has others, too."""
    return _linear(attn.qkv)


def _linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not lean.hooked(layer)


def last_attention(block: Block, prefix: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """The attention half for the prefix tokens only: all that a class-token head reads of the last block."""
    attn = block.attn
    h = block.norm1(x)
    heads = _absorbed_heads if _plain_heads(attn) and not _dropout(attn) else _prefix_heads
    y = heads(attn, prefix, h, bias).transpose(1, 2).flatten(2)
    return _after_heads(block, None, x[:, :prefix], h[:, :prefix], y)


def _prefix_heads(attn: Attention, prefix: int, h: Tensor, bias: Tensor | None) -> Tensor:
    """What the heads tell the prefix tokens, (b, h, prefix, d)."""
    batch, count, _ = h.shape
    split = attn.num_heads * attn.head_dim
    weight, qkv_bias = attn.qkv.weight, attn.qkv.bias
    q_bias, kv_bias = (None, None) if qkv_bias is None else (qkv_bias[:split], qkv_bias[split:])
    q = nn.functional.linear(h[:, :prefix], weight[:split], q_bias)
    kv = nn.functional.linear(h, weight[split:], kv_bias)
    q = q.view(batch, prefix, attn.num_heads, attn.head_dim).transpose(1, 2)
    k, v = kv.view(batch, count, 2, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    return ops.attend(attn.q_norm(q), attn.k_norm(k), v, bias, attn.scale, _dropout(attn))


def _absorbed_heads(attn: Attention, prefix: int, h: Tensor, bias: Tensor | None) -> Tensor:
    """The same of plain heads, without keys and values: q (h Wk)ᵀ = (q Wkᵀ) hᵀ and p (h Wv) = (p h) Wv, so that every
    head asks the tokens themselves. The bias of the keys adds the same to all logits of a query, and is left out."""
    batch, _, width = h.shape
    heads, split = attn.num_heads, attn.num_heads * attn.head_dim
    q_bias, v_bias = (None, None) if attn.qkv.bias is None else (attn.qkv.bias[:split], attn.qkv.bias[2 * split :])
    k_weight, v_weight = attn.qkv.weight[split:].view(2, heads, attn.head_dim, width).unbind(0)
    q = nn.functional.linear(h[:, :prefix], attn.qkv.weight[:split], q_bias)
    asked = q.view(batch * prefix, heads, attn.head_dim).transpose(0, 1) @ k_weight
    asked = asked.view(heads, batch, prefix, width).transpose(0, 1).flatten(1, 2).unsqueeze(1)
    seen = ops.attend(asked, h.unsqueeze(1), h.unsqueeze(1), bias, attn.scale)
    seen = seen.view(batch, heads, prefix, width).transpose(0, 1).flatten(1, 2)
    y = (seen @ v_weight.transpose(1, 2)).view(heads, batch, prefix, attn.head_dim).transpose(0, 1)
    return y if v_bias is None else y + v_bias.view(heads, 1, -1)


def _after_heads(block: Block, space: Lean | None, x: Tensor | None, h: Tensor, y: Tensor) -> Tensor:
    """What follows the heads: inner norm and gate where the host has them, projection, layer scale, drop path."""
    attn = block.attn
    y = _call(attn.norm, y)
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(h).sigmoid()
    after = (attn.proj_drop, block.ls1, block.drop_path1)
    if space is not None and x is not None and all(map(lean.idle, after)):
        return space.residual(x, attn.proj, y)
    return _plus(x, _chain(after, attn.proj(y)))


def mlp(block: Block, space: Lean | None, x: Tensor) -> Tensor:
    """The block's MLP half."""
    return _mlp(block, space, x, block.norm2(x))


def mlp_alone(block: Block, space: Lean | None, h: Tensor) -> Tensor:
    """What the MLP adds to the residual."""
    return _mlp(block, space, None, h)


def _mlp(block: Block, space: Lean | None, x: Tensor | None, h: Tensor) -> Tensor:
    inner = block.mlp
    if space is None or type(inner) is not Mlp or type(inner.act) is not nn.GELU:
        return _plus(x, _call(block.drop_path2, _call(block.ls2, inner(h))))
    h = space.gelu(inner.fc1, h, inner.act.approximate)
    h = _chain((inner.drop1, inner.norm), h)
    after = (inner.drop2, block.ls2, block.drop_path2)
    if x is not None and all(map(lean.idle, after)):
        return space.residual(x, inner.fc2, h)
    return _plus(x, _chain(after, inner.fc2(h)))


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return x if lean.idle(module) else module(x)


def _chain(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    return functools.reduce(lambda x, module: _call(module, x), modules, x)


def usable(block: Block, space: Lean | None) -> Lean | None:
    """`space` if nobody looks at what would be overwritten or left out in this block."""
    if space is None:
        return None
    a, m = block.attn, block.mlp
    watched = (a.qkv, a.proj, a.proj_drop, block.ls1, block.drop_path1, m, block.ls2, block.drop_path2)
    return None if lean.hooked(*watched, *m.children()) else space


def _dropout(attn: Attention) -> float:
    return attn.attn_drop.p if attn.training else 0.0
