"""Cost of single images, for methods that keep a different number of tokens in each image (`variable_length`)."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from dtem import integrations
from dtem.errors import DtemError
from dtem.methods.cost_model import Cost, block_gflops, fit
from dtem.types import HostSpec


def fit_token_costs(cost: Cost, host: HostSpec) -> Float[Tensor, "6"]:
    """Coefficients of the cost model, for `macs_at`. `cost` counts the GFLOPs of a plan, in either convention."""
    return fit(cost, (1,) * host.depth, host)


def macs_at(coefficients: Float[Tensor, "6"], tokens: Shaped[Tensor, "b l"], host: HostSpec) -> Float[Tensor, " b"]:
    """Operations of each image of the host's own size, from its number of tokens after every block."""
    after = tokens.to(coefficients.dtype)
    first = after.new_full((len(after), 1), host.patches + host.prefix)
    before = torch.cat([first, after[:, :-1]], dim=1)
    return 1e9 * (coefficients[0] + block_gflops(coefficients[1:], before, after).sum(dim=1))


def tokens_per_block(trace: integrations.Trace) -> Int[Tensor, "b l"]:
    """Number of tokens of every image after each block of one traced forward, without padding (size 0)."""
    return torch.stack([(size > 0).sum(dim=1) for size in trace.sizes], dim=1).cpu()


def measure_tokens(model: nn.Module, batches: Iterable[Tensor]) -> Int[Tensor, "b l"]:
    """`tokens_per_block` of several batches of images."""
    counts = []
    merger = model.dtem
    assert isinstance(merger, integrations.Merger)
    for images in batches:
        with torch.no_grad(), merger.tracing() as trace:
            integrations.as_logits_fn(model)(images)
        counts.append(tokens_per_block(trace))
    if not counts:
        raise DtemError("there are no images to count tokens on: give one batch or more")
    return torch.cat(counts)
