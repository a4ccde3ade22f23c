"""A timm ViT walked through token by token, for one image: lists of states and plain attention matrices.

What a method does is a function of its own: it gets the states of all tokens, and for every token what the class token
makes of it, and answers the new states and, for each, the list of old tokens that it holds.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

States = list[Tensor]
Step = Callable[[States, Tensor, int], tuple[States, list[list[int]]]]
"""States, class attention, r -> new states, and the old tokens that each holds."""
Early = Callable[[int, States, int], tuple[States, list[list[int]]]]
"""Block, states, r -> the same, before the block."""


def run(
    model: nn.Module, image: Tensor, plan: tuple[int, ...], step: Step | None = None, early: Early | None = None
) -> tuple[Tensor, list[list[int]]]:
    """Scores of one image, and which of the first tokens each of the last ones holds."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    holds = [[index] for index in range(len(states))]
    for layer, (block, r) in enumerate(zip(model.blocks, plan, strict=True)):
        if r and early is not None:
            states, groups = early(layer, states, r)
            holds = [[first for index in group for first in holds[index]] for group in groups]
        states, looks = attend(block, states)
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


def attend(block: nn.Module, states: States) -> tuple[States, Tensor]:
    """States after the attention residual, and the first token's attention to all, averaged over heads."""
    attn = block.attn
    count, width = len(states), attn.head_dim
    qkv = torch.stack([attn.qkv(block.norm1(state)) for state in states]).view(count, 3, attn.num_heads, width)
    heads, looks = [], torch.zeros(count, dtype=states[0].dtype)
    for head in range(attn.num_heads):
        q, k, v = attn.q_norm(qkv[:, 0, head]), attn.k_norm(qkv[:, 1, head]), qkv[:, 2, head]
        matrix = (q @ k.T / math.sqrt(width)).exp()
        matrix = matrix / matrix.sum(dim=1, keepdim=True)
        heads.append(matrix @ v)
        looks = looks + matrix[0] / attn.num_heads
    update = attn.proj(attn.norm(torch.cat(heads, dim=1)))
    return [state + block.ls1(change) for state, change in zip(states, update, strict=True)], looks


def source_of(holds: list[list[int]], prefix: int, patches: int) -> Tensor:
    """For each patch the token that holds it, −1 if none does."""
    source = torch.full((prefix + patches,), -1)
    for token, held in enumerate(holds):
        source[held] = token
    return source[prefix:]
