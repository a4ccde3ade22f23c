"""ToMe on a timm ViT, written out token by token: explicit attention matrices, Python loops, lists of members.

Slow, and as unlike the package as can be: what it shares with it is the host's weights and the published rule
(even positions point at odd ones, prefix tokens left out; kept even tokens come first, then the odd ones).
"""

import math

import torch
from torch import Tensor, nn


def logits(model: nn.Module, image: Tensor, plan: list[int], proportional: bool = True) -> Tensor:
    """Class scores of one image, (channels, height, width), after merging plan[l] tokens in block l."""
    grid = model.patch_embed(image[None])
    states = list(model.norm_pre(model._pos_embed(grid))[0])
    members = [[index] for index in range(len(states))]  # which of the first tokens each token stands for
    for block, r in zip(model.blocks, plan, strict=True):
        update, keys = _attend(block.attn, [block.norm1(state) for state in states], members, proportional)
        states = [state + block.ls1(change) for state, change in zip(states, update, strict=True)]
        states, members = _merge(states, members, keys, r, model.num_prefix_tokens)
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    states = [model.norm(state) for state in states]
    if model.global_pool == "token+max":
        patches = [model.aux_head(state) for state in states[1:]]
        return model.head(states[0]) + 0.5 * torch.stack(patches).max(dim=0).values
    if model.global_pool == "token":
        pooled = states[0]
    else:  # mean over patches: each token once for every patch that it holds
        prefix = model.num_prefix_tokens
        patches = [state for state, held in zip(states[prefix:], members[prefix:], strict=True) for _ in held]
        pooled = torch.stack(patches).mean(dim=0)
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2
    return model.head(model.fc_norm(pooled))


def _attend(attn: nn.Module, inputs: list[Tensor], members: list[list[int]], proportional: bool):
    heads, width = attn.num_heads, attn.head_dim
    weights = torch.tensor([float(len(held)) if proportional else 1.0 for held in members])
    outputs, all_keys = [], []
    queries, keys, values = torch.stack([attn.qkv(h) for h in inputs]).split(heads * width, dim=1)
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        q, k, v = attn.q_norm(queries[:, own]), attn.k_norm(keys[:, own]), values[:, own]
        share = (q @ k.T / math.sqrt(width)).exp() * weights  # a token of size m counts m times
        outputs.append(share / share.sum(dim=1, keepdim=True) @ v)
        all_keys.append(k)
    update = attn.proj(attn.norm(torch.cat(outputs, dim=1)))
    return list(update), sum(all_keys) / heads


def _merge(states: list[Tensor], members: list[list[int]], keys: Tensor, r: int, prefix: int):
    if r == 0:
        return states, members
    patches = range(prefix, len(states))
    side_a, side_b = [i for i in patches if i % 2 == 0], [j for j in patches if j % 2 == 1]
    edges = []
    for i in side_a:
        scores = torch.cosine_similarity(keys[i], keys[side_b], dim=1).tolist()
        best = max(range(len(side_b)), key=lambda at, scores=scores: (scores[at], -at))
        edges.append((-scores[best], i, side_b[best]))
    groups = {index: [index] for index in [*range(prefix), *side_a, *side_b]}
    for _, i, j in sorted(edges)[:r]:
        groups[j] += groups.pop(i)
    merged, held = [], []
    for group in groups.values():
        total = sum(len(members[index]) for index in group)
        merged.append(sum(states[index] * (len(members[index]) / total) for index in group))
        held.append([first for index in group for first in members[index]])
    return merged, held
