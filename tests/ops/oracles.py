"""The operators written as slowly and plainly as possible: loops over tokens, no shared code with `dtem.ops`."""

import math

import torch
from torch import Tensor


def split(tokens: int, prefix: int) -> tuple[list[int], list[int]]:
    """Positions of side A (even) and of side B (odd), prefix left out."""
    return (
        [p for p in range(prefix, tokens) if p % 2 == 0],
        [p for p in range(prefix, tokens) if p % 2 == 1],
    )


def cosine(u: list[float], v: list[float]) -> float:
    norm = math.sqrt(math.fsum(a * a for a in u)) * math.sqrt(math.fsum(b * b for b in v))
    return math.fsum(a * b for a, b in zip(u, v, strict=True)) / norm


def match(metric: Tensor, r: int, prefix: int) -> tuple[list[int], list[int], list[int]]:
    """For one image (n, d): kept positions in output order, merged positions, and the B position each one joins."""
    rows = metric.tolist()
    side_a, side_b = split(len(rows), prefix)
    edges = []  # (−similarity, A position, B position): sorting it puts the strongest first, ties by lower A
    for a in side_a:
        best, partner = -math.inf, None
        for b in side_b:
            similarity = cosine(rows[a], rows[b])
            if similarity > best:  # strictly: the lower B keeps a tie
                best, partner = similarity, b
        edges.append((-best, a, partner))
    taken = sorted(edges)[:r]
    merged = [a for _, a, _ in taken]
    kept = [*range(prefix), *(a for a in side_a if a not in merged), *side_b]
    return kept, merged, [b for _, _, b in taken]


def merge(
    x: Tensor, size: Tensor, kept: list[int], merged: list[int], partner: list[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """For one image: merged features (m, c), sizes (m) and, for each input token, the output token that holds it."""
    features, sizes = [], []
    source = [-1] * x.shape[0]
    for out, position in enumerate(kept):
        group = [position, *(a for a, b in zip(merged, partner, strict=True) if b == position)]
        for member in group:
            source[member] = out
        total = sum(size[member] for member in group)
        sizes.append(total)
        features.append(sum(size[member] * x[member] for member in group) / total)
    return torch.stack(features), torch.stack(sizes), source


def soft_group(
    similarity: Tensor, r: int | Tensor, temperature: float, scale: float, candidates: int | None = None
) -> Tensor:
    """The paper's loop over whole A×B matrices. Of an r that is not whole, the last step counts for the broken part."""
    s = similarity / scale
    if candidates is not None:
        s = s + candidate_mask(similarity, candidates)
    total = torch.zeros_like(s)
    for done in range(math.ceil(float(torch.as_tensor(r).detach()))):
        a = (s / temperature).flatten(1).softmax(dim=1).view_as(s)
        total = total + (a if r - done >= 1 else a * (r - done))
        s = s + torch.log(1 - a.sum(dim=2, keepdim=True))
    return total / total.sum(dim=2, keepdim=True).detach().clamp(min=1)


def candidate_mask(similarity: Tensor, count: int) -> Tensor:
    """0 for each row's `count` best entries (lower index first among equals), −inf elsewhere."""
    mask = torch.full_like(similarity, -math.inf)
    for image, rows in enumerate(similarity.tolist()):
        for i, row in enumerate(rows):
            for j in sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:count]:
                mask[image, i, j] = 0
    return mask


def soft_merge(
    x: Tensor, size: Tensor, edges: Tensor, r: int, prefix: int, excluded: int, exclude: str
) -> tuple[Tensor, Tensor]:
    """For one image, eq. 6-7 token by token, and then the order: prefix, kept A, kept B, newly excluded, excluded."""
    stop = x.shape[0] - excluded
    side_a, side_b = split(stop, prefix)
    new_x = {p: x[p] for p in range(x.shape[0])}
    new_size = {p: size[p] for p in range(x.shape[0])}
    for j, b in enumerate(side_b):
        new_size[b] = size[b] + sum(edges[i, j] * size[a] for i, a in enumerate(side_a))
        flow = sum(edges[i, j] * size[a] * x[a] for i, a in enumerate(side_a))
        new_x[b] = (size[b] * x[b] + flow) / new_size[b]
    for i, a in enumerate(side_a):
        new_size[a] = size[a] * (1 - edges[i].sum())

    both = [*side_a, *side_b]
    if exclude == "mass":
        leaving = sorted(side_a, key=lambda a: (-float(edges[side_a.index(a)].sum()), a))[:r]
    else:
        leaving = sorted(both, key=lambda p: (float(new_size[p]), both.index(p)))[:r]
    order = [*range(prefix), *(p for p in both if p not in leaving), *leaving, *range(stop, x.shape[0])]
    return torch.stack([new_x[p] for p in order]), torch.stack([new_size[p] for p in order])


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + bias) v by an explicit matrix."""
    logits = torch.einsum("bhme,bhne->bhmn", q, k) * scale
    if bias is not None:
        logits = logits + bias[:, None, None, :]
    return torch.einsum("bhmn,bhne->bhme", logits.softmax(dim=-1), v)
