"""Kendall's rank correlation between similarities by attention keys and by embeddings, block by block.

In every block of the unmerged model, patches are compared by the mean over heads of their keys and by their embedding.
τ is 1 where both rank all pairs of an A and a B token (those that matching considers) alike, and 0 where the rankings
are unrelated. The paper does not say which pairs it takes.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dtem import integrations, ops
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.types import Taps


def kendall(a: Float[Tensor, "b n"], b: Float[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """τ of each row: (concordant − discordant) / all pairs. Ties are broken by index, in `a` and in `b`."""
    from scipy.stats import kendalltau

    pairs = zip(_ranks(a), _ranks(b), strict=True)
    return torch.tensor([kendalltau(x, y).statistic for x, y in pairs], dtype=torch.float64)


def _ranks(values: Float[Tensor, "b n"]) -> np.ndarray:
    return values.argsort(dim=-1, stable=True).argsort(dim=-1).cpu().numpy()


@torch.inference_mode()
def correlations(host: nn.Module, handle: Handle, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b l"]:
    """τ of every image in every block. `host` is the unpatched model, `handle` belongs to a patched copy of it."""
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
    projections, prefix = integrations.find(host).key_projections(host), handle.host.prefix
    by_block = []
    for layer, (h, (weight, bias)) in enumerate(zip(inputs, projections, strict=True)):
        keys = nn.functional.linear(h, weight, bias)
        embedded = method.metric(layer, Taps(h, keys[:, None], keys[:, None], keys[:, None], 1.0))
        by_block.append(kendall(*(ops.cosine(metric, prefix, 0).flatten(1) for metric in (keys, embedded))))
    return torch.stack(by_block, dim=1)
