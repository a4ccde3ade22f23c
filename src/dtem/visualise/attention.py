"""What the class token of the unmerged model looks at."""

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem import schedule as schedules
from dtem.adapters import Merger, tracing
from dtem.adapters.sharing import share
from dtem.handle import Handle
from dtem.methods.base import Config, Method
from dtem.types import HostSpec, Taps, Tokens


class _Watch(Method):
    """Merges nothing and keeps, block by block, the class token's attention to the patches. For one forward."""

    name = "watch"

    def __init__(self, host: HostSpec) -> None:
        super().__init__(host, Config())
        self.seen: list[Float[Tensor, "b p"]] = []

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        attention = ops.class_attention(taps.q, taps.k, None, taps.scale)
        self.seen.append(attention.mean(dim=1)[:, self.host.prefix :])
        return tokens


@torch.inference_mode()
def class_attention(handle: Handle, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b p"] | None:
    """Attention of the class token to each patch without merging: mean over heads and blocks, sum 1 over patches.

    None where the model has no class token, or where merging is undone in every block. The handle's model is left
    alone: what runs is a copy of it that shares its weights.
    """
    if handle.host.dense or "class_token" not in handle.host.provides:
        return None
    model, watch = share(handle.model), _Watch(handle.host)
    model.dtem = Merger(watch, schedules.Constant(0), handle.merger.family)
    with tracing():  # so that the blocks are walked through although nothing is merged
        model.eval()(images)
    mean = torch.stack(watch.seen).mean(dim=0)
    return mean / mean.sum(dim=1, keepdim=True)
