"""Class attention: what the class token of the unmerged model attends to."""

import torch
from jaxtyping import Float
from torch import Tensor

from dtem import ops
from dtem import schedule as schedules
from dtem.handle import Handle
from dtem.integrations import as_logits_fn
from dtem.integrations.weight_sharing import share
from dtem.methods.base import Config, Method
from dtem.types import HostSpec, Taps, Tokens


class _RecordAttention(Method):
    """Merges nothing and records the class token's attention to the patches, block by block. For one forward."""

    name = "record_attention"

    def __init__(self, host: HostSpec) -> None:
        super().__init__(host, Config())
        self.recorded: list[Float[Tensor, "b p"]] = []

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        attention = ops.class_attention(taps.q, taps.k, None, taps.scale)
        self.recorded.append(attention.mean(dim=1)[:, self.host.prefix :])
        return tokens


@torch.inference_mode()
def class_attention(handle: Handle, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b p"] | None:
    """Attention of the class token to each patch without merging: mean over heads and blocks, sum 1 over patches.

    None where the model has no class token, or where merging is undone in every block. The handle's model is left
    alone: what runs is a copy of it that shares its weights.
    """
    if handle.host.dense or "class_token" not in handle.host.provides:
        return None
    model, recorder = share(handle.model), _RecordAttention(handle.host)
    merger = Handle(model).merger
    merger.method, merger.schedule = recorder, schedules.Constant(0)
    with merger.tracing():  # otherwise blocks that merge nothing are not run one by one
        as_logits_fn(model.eval())(images)
    mean = torch.stack(recorder.recorded).mean(dim=0)
    return mean / mean.sum(dim=1, keepdim=True)
