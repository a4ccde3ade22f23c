"""Squeezing: a pruned token is mixed into its most similar kept token (TPS, https://arxiv.org/abs/2304.10716).

With cos_i the cosine of a pruned token i (the guest) and its most similar kept token (its host; ties: the lower index),
the host becomes a softmax-weighted mean of itself (at cosine 1) and its guests:

    x̂_host = (e x_host + Σ_i e^{cos_i} x_i) / (e + Σ_i e^{cos_i})
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dtem.ops.matching import full_precision
from dtem.ops.merging import flat


def find_hosts(
    guests: Float[Tensor, "b r c"], hosts: Float[Tensor, "b k c"], allowed: Bool[Tensor, "b #r k"] | None = None
) -> tuple[Float[Tensor, "b r"], Int[Tensor, "b r"]]:
    """The cosine of each guest with its most similar host, with gradient, and the index of that host.

    If `allowed` excludes all hosts of a guest, its cosine is −inf. In float32 (float64 stays).
    """
    with full_precision(guests.device):
        guests, hosts = (_unit(x) for x in (guests, hosts))
        cosine = torch.bmm(guests, hosts.mT)
        best, host = (cosine if allowed is None else cosine.masked_fill(~allowed, -torch.inf)).max(dim=2)
        return best, host


def _unit(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    if x.dtype != torch.float64:
        x = x.float()
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)


def squeeze(
    hosts: Float[Tensor, "b k c"],
    guests: Float[Tensor, "b r c"],
    cosine: Float[Tensor, "b r"],
    host: Int[Tensor, "b r"],
    present: Float[Tensor, "b r"] | None = None,
) -> Float[Tensor, "b k c"]:
    """Mix every host with its guests, computed as a correction: x_host + Σ_i w_i (x_i − x_host) / Σ w.

    In training, where no token is removed, `present` (0 or 1, with gradient) selects the guests.
    """
    batch, kept, width = hosts.shape
    index = flat(host, kept)
    weight = (cosine.exp() if present is None else cosine.exp() * present).reshape(-1)
    total = torch.full((batch * kept,), math.e, dtype=weight.dtype, device=weight.device).index_add(0, index, weight)
    share = (weight / total.index_select(0, index)).to(hosts.dtype).unsqueeze(1)
    rows = hosts.reshape(-1, width)
    change = (guests.reshape(-1, width) - rows.index_select(0, index)) * share
    return rows.index_add(0, index, change).view(batch, kept, width)
