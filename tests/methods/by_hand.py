"""A timm ViT written out token by token, for one image, with lists and explicit attention matrices: the oracle of the
methods. A method is a function from the states of all tokens and the class attention to the new states and, for each,
the list of old tokens that it holds. And checks that several methods share.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import dtem
from contract.hosts import fresh, gradients, images, patched

States = list[Tensor]
Step = Callable[[States, Tensor, int], tuple[States, list[list[int]]]]
"""States, class attention, r -> new states, and the old tokens that each holds."""
Early = Callable[[int, States, int], tuple[States, list[list[int]]]]
"""Block, states, r -> the same, before the block."""


class Seen(NamedTuple):
    """What a block reads and computes, for methods that need more than the class token's attention."""

    layer: int
    before: States
    """States before the block."""
    keys: list[Tensor]
    """Of each token, the mean of its keys over heads."""
    values: list[Tensor]
    """Of each token, its values in all heads, concatenated."""
    matrices: list[Tensor]
    """Attention matrix of each head."""
    sizes: list[int]


Full = Callable[[States, Seen, int], tuple[States, list[list[int]]]]
"""A step that takes `Seen` in place of the class attention."""


def run(
    model: nn.Module,
    image: Tensor,
    plan: tuple[int, ...],
    step: Step | None = None,
    early: Early | None = None,
    proportional: bool = False,
    full: Full | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Logits of one image, and which of the initial tokens each of the final ones holds."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    holds = [[index] for index in range(len(states))]
    for layer, (block, r) in enumerate(zip(model.blocks, plan, strict=True)):
        if r and early is not None:
            states, groups = early(layer, states, r)
            holds = [[first for index in group for first in holds[index]] for group in groups]
        before, sizes = states, [len(held) for held in holds]
        states, looks = attend(block, states, sizes if proportional else None)
        if r and full is not None:
            keys, values, matrices = heads_of(block, before, sizes if proportional else None)
            seen = Seen(layer, before, list(keys.mean(dim=1)), list(values.flatten(1)), matrices, sizes)
            states, groups = full(states, seen, r)
            holds = [[first for index in group for first in holds[index]] for group in groups]
        if r and step is not None:
            states, groups = step(states, looks, r)
            holds = [[first for index in group for first in holds[index]] for group in groups]
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    states = [model.norm(state) for state in states]
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2, holds
    pooled = states[0]
    if model.global_pool == "avg":
        counts = [max(len(held), 1) for held in holds[prefix:]]
        pooled = sum(state * count / sum(counts) for state, count in zip(states[prefix:], counts, strict=True))
    return model.head(model.fc_norm(pooled)), holds


def attend(block: nn.Module, states: States, sizes: list[int] | None = None) -> tuple[States, Tensor]:
    """States after the attention residual, and the first token's attention to all, averaged over heads."""
    _, values, matrices = heads_of(block, states, sizes)
    mixed = [matrix @ values[:, head] for head, matrix in enumerate(matrices)]
    update = block.attn.proj(block.attn.norm(torch.cat(mixed, dim=1)))
    looks = sum(matrix[0] for matrix in matrices) / len(matrices)
    return [state + block.ls1(change) for state, change in zip(states, update, strict=True)], looks


def heads_of(block: nn.Module, states: States, sizes: list[int] | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Keys and values, (n, heads, e), and the attention matrix of every head."""
    attn, count = block.attn, len(states)
    qkv = torch.stack([attn.qkv(block.norm1(state)) for state in states]).view(count, 3, attn.num_heads, attn.head_dim)
    weights = torch.tensor([1] * count if sizes is None else sizes, dtype=states[0].dtype)
    queries, keys, matrices = attn.q_norm(qkv[:, 0]), attn.k_norm(qkv[:, 1]), []
    for head in range(attn.num_heads):
        matrix = (queries[:, head] @ keys[:, head].T / math.sqrt(attn.head_dim)).exp() * weights
        matrices.append(matrix / matrix.sum(dim=1, keepdim=True))
    return keys, qkv[:, 2], matrices


def source_of(holds: list[list[int]], prefix: int, patches: int) -> Tensor:
    """For each patch the token that holds it, −1 if none does."""
    source = torch.full((prefix + patches,), -1)
    for token, held in enumerate(holds):
        source[held] = token
    return source[prefix:]


def check_forward(
    name: str,
    handle: dtem.Handle,
    step: Step | None = None,
    early: Early | None = None,
    proportional: bool = False,
    full: Full | None = None,
) -> None:
    """Logits, source maps and sizes of a patched model are those written out, in float64 (sizes are float32)."""
    tolerance = 1e-6 if proportional else 1e-9
    model, host, x = handle.model.double(), fresh(name).double(), images(name).double()
    prefix = handle.host.prefix
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            logits = model(batch)
        for image, row, source, size in zip(batch, logits, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, holds = run(host, image, handle.plan, step, early, proportional, full)
            torch.testing.assert_close(row, expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(source, source_of(holds, prefix, 64))
            assert size.tolist() == [len(held) for held in holds]


def check_gradients(
    method: str, step: Step | None, proportional: bool = False, full: Full | None = None, **options: object
) -> None:
    """The gradient of every weight of the host is that of the method written out, in float64."""
    model, handle = patched("deit", method, [20, 9, 5, 0], **options)
    x = images("deit", batch=1).double()
    _, computed = gradients(model.double(), x)
    host = fresh("deit").double()
    out = run(host, x[0], handle.plan, step, None, proportional, full)[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    rtol = 1e-5 if proportional else 1e-8
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            computed[key], parameter.grad, rtol=rtol, atol=rtol / 10, msg=lambda m, key=key: f"{key}: {m}"
        )


def check_half_precision(method: str, mode: str) -> None:
    """Outputs and gradients are finite under autocast and in bfloat16."""
    model, handle = patched("deit", method)
    handle.mode = mode
    with torch.autocast("cpu", dtype=torch.bfloat16), handle.auxiliary_losses() as losses:
        out = model(images("deit"))
    sum(losses.values(), out.float().square().mean()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.isfinite(model.to(torch.bfloat16)(images("deit").bfloat16())).all()


def check_losses_under_checkpointing(method: str, loss: str, weight: float, shortcut: bool, atol: float) -> None:
    """An auxiliary loss and its gradients are the same with gradient checkpointing."""
    outcomes = []
    for checkpointing in (False, True):
        model, handle = patched("deit", method, shortcut=shortcut)
        model.train()
        model.set_grad_checkpointing(checkpointing)
        handle.mode = "soft"
        torch.manual_seed(0)
        with handle.auxiliary_losses() as losses:
            out = model(images("deit"))
        (weight * losses[loss] + out.square().mean()).backward()
        outcomes.append([losses[loss].detach(), *(parameter.grad for parameter in handle.method.parameters())])
    for plain, recomputed in zip(*outcomes, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=atol)
