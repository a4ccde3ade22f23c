"""Soft grouping: a relaxation of the choice of the r strongest edges (eq. 3-5 of https://arxiv.org/abs/2412.10569).

As published, with S⁰ the similarities and for t = 1 … r:

    A^t = softmax over all of A×B of S^t / τ        S^{t+1} = S^t + log(1 − Σ_j A^t_ij)        A* = Σ_t A^t

The update adds one number to each row, so S^t_ij = S_ij + c^t_i, and the loop runs over rows only:

    R_i = logsumexp_j(S_ij / τ)      P_ij = softmax_j(S_ij / τ)
    p^t = softmax_i(R_i + c^t_i / τ)      c^{t+1}_i = c^t_i + log(1 − p^t_i)      A*_ij = P_ij · Σ_t p^t_i

Values and gradients equal those of the published loop, with 1/|B| of its work and memory.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtem.errors import DtemError
from dtem.ops.matching import check_r


def soft_group(
    similarity: Float[Tensor, "b i j"],
    r: int,
    temperature: float = 0.1,
    scale: float = 0.1,
    candidates: int | None = None,
) -> Float[Tensor, "b i j"]:
    """Soft adjacency E = A* / max(1, stopgrad(Σ_j A*_ij)) for r merges, with S = `similarity` / `scale`.

    `candidates` restricts every A token to its most similar few B tokens (None: all, as in the paper). Runs in float32.
    """
    check_r(r, sum(similarity.shape[1:]))
    if r == 0:
        return 0.0 * similarity
    if candidates is not None:
        similarity = keep_candidates(similarity, candidates)
    logits = similarity if similarity.dtype == torch.float64 else similarity.float()
    edges: Tensor = _SoftGroup.apply(logits, r, temperature, scale)
    return edges


def row_mass(
    row_logit: Float[Tensor, "b i"], r: int, temperature: float
) -> tuple[Float[Tensor, "b i"], Float[Tensor, "r b i"]]:
    """Σ_t p^t, the merged mass of each A token after r steps, and the p^t themselves."""
    floor = torch.finfo(row_logit.dtype).eps  # keeps log(1 − p) finite as p → 1
    steps = []
    for _ in range(r):
        p = row_logit.softmax(dim=-1)
        steps.append(p)
        row_logit = row_logit + (1.0 - p).clamp(min=floor).log() / temperature
    history = torch.stack(steps) if steps else row_logit.new_zeros(0, *row_logit.shape)
    return history.sum(dim=0), history


def keep_candidates(similarity: Float[Tensor, "b i j"], count: int) -> Float[Tensor, "b i j"]:
    """Set all but each row's `count` largest entries to −inf. Ties go to the lower index."""
    if count < 1:
        raise DtemError(f"candidates = {count} must be at least 1, or None for all")
    with torch.no_grad():
        rest, keep = similarity.clone(), torch.zeros_like(similarity, dtype=torch.bool)
        for _ in range(min(count, similarity.shape[2])):
            best = rest.argmax(dim=2, keepdim=True)
            keep.scatter_(2, best, True)
            rest.scatter_(2, best, -torch.inf)
    return similarity.masked_fill(~keep, -torch.inf)


class _SoftGroup(torch.autograd.Function):
    """A*, clipped. Its own backward saves one matrix (P) and r vectors, where autograd would save five matrices."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, r: int, temperature: float, scale: float) -> Tensor:
        logits = similarity * (1.0 / (scale * temperature))  # S / τ
        rows = torch.softmax(logits, dim=2)  # P
        # R from the largest entry: P_max = exp(S_max / τ − R) is never small, and maxima are cheap
        row_logit = logits.amax(dim=2) - rows.amax(dim=2).log()
        mass, steps = row_mass(row_logit, r, temperature)
        ctx.save_for_backward(rows, steps, mass)
        ctx.temperature, ctx.scale = temperature, scale
        weight = mass / mass.clamp(min=1.0)  # no gradient through the clip
        return torch.mul(rows, weight.unsqueeze(2), out=logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, steps, mass = ctx.saved_tensors
        clip = mass.clamp(min=1.0)
        product = grad * rows
        grad_mass = product.sum(dim=2) / clip
        grad_row = _row_mass_backward(grad_mass, steps, ctx.temperature)
        # through P: P (g w − w Σ_j g P), with g = grad / clip; through R: P · grad_row
        inner = 1.0 / (ctx.scale * ctx.temperature)
        offset = (grad_row - mass * grad_mass) * inner
        weight = mass / clip * inner
        result = product.mul_(weight.unsqueeze(2)).addcmul_(rows, offset.unsqueeze(2))
        return result, None, None, None


def _row_mass_backward(
    grad: Float[Tensor, "b i"],
    steps: Float[Tensor, "r b i"],
    temperature: float,
) -> Float[Tensor, "b i"]:
    """Gradient of `row_mass` with respect to its row logits, by the recursion in reverse."""
    floor = torch.finfo(steps.dtype).eps
    grad_row = torch.zeros_like(grad)
    for t in reversed(range(len(steps))):  # grad_row is both dL/dR so far and, over τ, dL/dc^{t+1}
        p = steps[t]
        left = 1.0 - p
        through_log = torch.where(left > floor, grad_row / (temperature * left), 0.0)
        grad_p = grad - through_log
        grad_row = grad_row + p * (grad_p - (grad_p * p).sum(dim=-1, keepdim=True))
    return grad_row
