"""Proportional attention (ToMe, https://arxiv.org/abs/2210.09461): softmax(q kᵀ / √d + log m).

A token of size m counts as m tokens. Attention always runs in torch's fused kernel. log m is passed as a float mask or,
where it needs a gradient (with such a mask torch falls back to the slow kernel) and in half precision on a GPU (flash
attention takes no mask), as one more channel: q' = [q, 1/s], k' = [k, log m].
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from dtem.ops.matching import full_precision
from dtem.ops.merging import floor
from dtem.types import SIZE_FLOOR


def log_size(size: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """log m with a floor ε under m. Below it the gradient is 1/ε.

    Attention weights m_i exp(s_i) / Σ_j m_j exp(s_j) have a gradient in m_i at m_i = 0, exp(s_i) / Σ_j m_j exp(s_j).
    With this floor, softmax(s + log m) has the same: the weight of such a token is ε times that.
    """
    return floor(size, SIZE_FLOOR).log()


def attend(
    q: Float[Tensor, "b h q e"],
    k: Float[Tensor, "b h n e"],
    v: Float[Tensor, "b h n e"],
    bias: Float[Tensor, "b n"] | None,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "b h q e"]:
    """Fused attention with `bias` (log sizes) added to the logits by key."""
    if bias is None or not takes_channel(q, bias):
        mask = None if bias is None else bias.to(q.dtype)[:, None, None]
        queries = q.shape[2]
        q = _fill_query_blocks(q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        if q.shape[2] > queries:  # in the layout of the kernel, so that concatenating the heads is a view
            out = out.transpose(1, 2)[:, :queries].contiguous().transpose(1, 2)
        return out
    return attend_by_channel(q, k, v, bias, scale, dropout)


def takes_channel(q: Tensor, bias: Tensor) -> bool:
    """Whether the bias is better one more channel than a mask: a mask that needs a gradient has no fast kernel, and in
    half precision the fastest kernel of a GPU (flash attention) takes none."""
    if bias.requires_grad and torch.is_grad_enabled():
        return True
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)


def attend_by_channel(
    q: Float[Tensor, "b h q e"],
    k: Float[Tensor, "b h n e"],
    v: Float[Tensor, "b h n e"],
    bias: Float[Tensor, "b n"],
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "b h q e"]:
    """Attention with the bias as one more channel of q and k: without a mask, every fused kernel can be used."""
    q = torch.cat([q, q.new_full((), 1.0 / scale).expand(*q.shape[:3], 1)], dim=-1)
    k = torch.cat([k, bias.to(k.dtype)[:, None, :, None].expand(*k.shape[:3], 1)], dim=-1)
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 1)), dropout_p=dropout, scale=scale)
    return out[..., :-1]


def _fill_query_blocks(q: Float[Tensor, "b h q e"]) -> Float[Tensor, "b h m e"]:
    """Pad with zero queries up to 192 where that is faster: from 192 on, torch's CPU kernel works on 64 queries at a
    time, below on 32, at half the speed per query. It pays from about 168 queries on, for more than one image."""
    if torch.compiler.is_exporting():  # other runtimes have other kernels
        return q
    batch, heads, count, width = q.shape
    if not 168 <= count < 192 or batch * heads < 16 or q.device.type != "cpu" or q.dtype != torch.float32:
        return q
    if torch.is_grad_enabled():
        return q
    filled = q.new_empty(batch, 192, heads, width).transpose(1, 2)
    filled[:, :, :count] = q
    filled[:, :, count:] = 0.0
    return filled


def class_attention(
    q: Float[Tensor, "b h n e"],
    k: Float[Tensor, "b h n e"],
    bias: Float[Tensor, "b n"] | None,
    scale: float,
) -> Float[Tensor, "b h n"]:
    """Attention of the class token to every token: the row of the attention matrix that pruning methods need.

    In float32 (float64 stays): tokens are ranked by it, and in half precision there would be many ties.
    """
    with full_precision(q.device):
        q = q[:, :, :1]
        if q.dtype != torch.float64:
            q, k = q.float(), k.float()
        logits = (q @ k.transpose(2, 3)).squeeze(2) * scale
        return (logits if bias is None else logits + bias.unsqueeze(1)).softmax(dim=-1)
