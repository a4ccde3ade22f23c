"""How far the embedding orders pairs of tokens as the attention keys do: Kendall's rank correlation, block by block.

In every block of the unmerged model the patches are compared twice, by the mean over heads of their keys and by their
embedding. τ is 1 where both order all pairs of an A and a B token (those that matching looks at) alike, 0 where they
have nothing in common. The paper does not say which pairs it takes.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dtem import adapters, ops
from dtem.handle import Handle
from dtem.types import DtemError, Taps


def kendall(a: Float[Tensor, "*b n"], b: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """τ between the orders of `a` and `b`: (concordant − discordant) / all pairs. Ties are taken to be in order."""
    n = a.shape[-1]
    order = a.argsort(dim=-1, stable=True)
    ranks = b.argsort(dim=-1, stable=True).argsort(dim=-1).gather(-1, order)
    return 1 - 4 * inversions(ranks).double() / (n * (n - 1))


def inversions(order: Int[Tensor, "*b n"]) -> Int[Tensor, "*b"]:
    """Pairs of a permutation of 0 … n − 1 of which the larger stands first; bit by bit, so in n log n steps."""
    n = order.shape[-1]
    places = torch.arange(n, device=order.device)
    total = order.new_zeros(order.shape[:-1])
    for bit in range(max(1, (n - 1).bit_length())):
        # Numbers that agree in all higher bits stand together, in their old order; 2^(bit+1) of them, the last fewer.
        grouped = order.gather(-1, (order >> (bit + 1)).argsort(dim=-1, stable=True))
        ones = (grouped >> bit) & 1
        before = ones.cumsum(dim=-1) - ones
        start = (places >> (bit + 1)) << (bit + 1)
        total = total + ((1 - ones) * (before - before[..., start])).sum(dim=-1)
    return total


@torch.inference_mode()
def correlations(host: nn.Module, handle: Handle, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b l"]:
    """τ of every image in every block. `host` is the unpatched model that `handle` steers a copy of."""
    blocks: Any = getattr(host, "blocks", None)
    if blocks is None or not all(hasattr(block, "norm1") for block in blocks):
        raise DtemError(f"{type(host).__name__}: rank correlations are for timm's ViTs, whose blocks have a norm1")
    inputs: list[Tensor] = []
    hooks = [block.norm1.register_forward_hook(lambda *call: inputs.append(call[2])) for block in blocks]
    try:
        host.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    method: Any = handle.method
    projections, prefix = adapters.find(host).key_projections(host), handle.host.prefix
    found = []
    for layer, (h, (weight, bias)) in enumerate(zip(inputs, projections, strict=True)):
        keys = nn.functional.linear(h, weight, bias)
        embedded = method.metric(layer, Taps(h, keys[:, None], keys[:, None], keys[:, None], 1.0))
        found.append(kendall(*(ops.cosine(each, prefix, 0).flatten(1) for each in (keys, embedded))))
    return torch.stack(found, dim=1)
