"""Soft grouping: the relaxation of "take the r strongest edges" (eq. 3-5 of the paper).

Literally, with S⁰ the similarities and for t = 1 … r:

    A^t = softmax over all of A×B of S^t / τ        S^{t+1} = S^t + log(1 − Σ_j A^t_ij)        A* = Σ_t A^t

The update adds one number to a whole row, so S^t_ij = S_ij + c^t_i, and the loop needs rows only:

    R_i = logsumexp_j(S_ij / τ)      P_ij = softmax_j(S_ij / τ)
    p^t = softmax_i(R_i + c^t_i / τ)      c^{t+1}_i = c^t_i + log(1 − p^t_i)      A*_ij = P_ij · Σ_t p^t_i

Values and gradients are those of the literal loop, at 1/|B| of its work and memory.

A number of merges r that is learned need not be whole. It then is a weight g_t for every step (`step_gates`): all of
the steps up to r, the broken part of the next one, and A* = Σ_t g_t A^t.

`gumbel_group` is the alternative that the paper compares with.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtem.ops.matching import check_r
from dtem.types import DtemError


def soft_group(
    similarity: Float[Tensor, "b i j"],
    r: int,
    temperature: float = 0.1,
    scale: float = 0.1,
    candidates: int | None = None,
    gates: Float[Tensor, " r"] | None = None,
) -> Float[Tensor, "b i j"]:
    """Soft adjacency E = A* / max(1, stopgrad(Σ_j A*_ij)) for r merges, with S = `similarity` / `scale`.

    `candidates` keeps only each A token's best few B tokens (None: all, the paper's equation). `gates` weighs the
    steps (None: all alike). Runs in float32.
    """
    check_r(r, sum(similarity.shape[1:]))
    if r == 0:
        return 0.0 * similarity
    if candidates is not None:
        similarity = keep_candidates(similarity, candidates)
    logits = similarity if similarity.dtype == torch.float64 else similarity.float()
    edges: Tensor = _SoftGroup.apply(logits, r, temperature, scale, None if gates is None else gates.to(logits.dtype))
    return edges


def step_gates(rate: Float[Tensor, ""], steps: int) -> Float[Tensor, " steps"]:
    """g_t = clamp(rate − t + 1, 0, 1) for t = 1 … steps: a number of merges that need not be whole.

    Linear, not a sigmoid: at whole numbers it is the plain loop, so training ends in what it was trained for, and one
    step alone carries the gradient, which is what one more merge would do to the loss. At a whole number that is the
    step to come; at `steps`, where there is none, and above it, the last one.
    """
    t = torch.arange(1, steps + 1, device=rate.device)
    rate = rate - (rate.detach() - steps).clamp(min=0.0)
    whole = rate.detach().floor().clamp(max=steps - 1)
    return (t <= whole) + (t == whole + 1) * (rate - whole)


def gumbel_group(
    similarity: Float[Tensor, "b i j"],
    r: int,
    temperature: float = 0.1,
    scale: float = 0.1,
    candidates: int | None = None,
    gates: Float[Tensor, " r"] | None = None,
    noise: bool = True,
) -> Float[Tensor, "b i j"]:
    """The other relaxation: E_ij = softmax_j((S_ij + g_ij) / τ) in r rows, 0 in all others; S = `similarity` / `scale`.

    g is standard Gumbel noise, so that each row is a relaxed sample of its partner, by the odds exp S_ij; without
    `noise` it is 0. The rows are the r with the largest similarity, ties to the lower index: those that hard matching
    merges. That choice has no gradient. `gates` weighs the rows, strongest first (None: all alike).
    """
    check_r(r, sum(similarity.shape[1:]))
    if r == 0:
        return 0.0 * similarity
    if candidates is not None:
        similarity = keep_candidates(similarity, candidates)
    logits = (similarity if similarity.dtype == torch.float64 else similarity.float()) / scale
    rows = F.gumbel_softmax(logits, tau=temperature, dim=2) if noise else torch.softmax(logits / temperature, dim=2)
    order = torch.sort(similarity.detach().amax(dim=2), dim=1, descending=True, stable=True).indices
    weight = rows.new_ones(r) if gates is None else gates.to(rows.dtype)
    chosen = torch.zeros_like(rows[:, :, 0]).scatter(1, order[:, :r], weight.expand(len(rows), -1))
    return rows * chosen.unsqueeze(2)


def row_mass(
    row_logit: Float[Tensor, "b i"], r: int, temperature: float, gates: Float[Tensor, " r"] | None = None
) -> tuple[Float[Tensor, "b i"], Float[Tensor, "r b i"]]:
    """Σ_t g_t p^t, the mass that each A token gives away in r steps, and the p^t themselves."""
    floor = torch.finfo(row_logit.dtype).eps  # keeps log(1 − p) finite as p → 1
    steps = []
    for _ in range(r):
        p = row_logit.softmax(dim=-1)
        steps.append(p)
        row_logit = row_logit + (1.0 - p).clamp(min=floor).log() / temperature
    history = torch.stack(steps) if steps else row_logit.new_zeros(0, *row_logit.shape)
    return (history if gates is None else history * gates.view(-1, 1, 1)).sum(dim=0), history


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
    """A*, clipped. Saves one matrix (P) and r vectors; written by hand since autograd would save five matrices."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, r: int, temperature: float, scale: float, gates: Tensor | None) -> Tensor:
        logits = similarity * (1.0 / (scale * temperature))  # S / τ
        rows = torch.softmax(logits, dim=2)  # P
        # R by way of the largest entry: P_max = exp(S_max / τ − R) is never small, and the maxima are cheap
        row_logit = logits.amax(dim=2) - rows.amax(dim=2).log()
        mass, steps = row_mass(row_logit, r, temperature, gates)
        ctx.save_for_backward(rows, steps, mass, gates)
        ctx.temperature, ctx.scale = temperature, scale
        weight = mass / mass.clamp(min=1.0)  # the clip's denominator has no gradient
        return torch.mul(rows, weight.unsqueeze(2), out=logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, Tensor | None]:
        rows, steps, mass, gates = ctx.saved_tensors
        clip = mass.clamp(min=1.0)
        product = grad * rows
        grad_mass = product.sum(dim=2) / clip
        grad_row = _row_mass_backward(grad_mass, steps, ctx.temperature, gates)
        # through P: P (g w − w Σ_j g P), with g = grad / clip; through R: P · grad_row
        inner = 1.0 / (ctx.scale * ctx.temperature)
        offset = (grad_row - mass * grad_mass) * inner
        weight = mass / clip * inner
        result = product.mul_(weight.unsqueeze(2)).addcmul_(rows, offset.unsqueeze(2))
        grad_gates = (steps * grad_mass).sum(dim=(1, 2)) if ctx.needs_input_grad[4] else None
        return result, None, None, None, grad_gates


def _row_mass_backward(
    grad: Float[Tensor, "b i"],
    steps: Float[Tensor, "r b i"],
    temperature: float,
    gates: Float[Tensor, " r"] | None,
) -> Float[Tensor, "b i"]:
    """Gradient of `row_mass` with respect to its row logits, walking the recursion backwards."""
    floor = torch.finfo(steps.dtype).eps
    grad_row = torch.zeros_like(grad)
    for t in reversed(range(len(steps))):  # grad_row is both dL/dR so far and, over τ, dL/dc^{t+1}
        p = steps[t]
        left = 1.0 - p
        through_log = torch.where(left > floor, grad_row / (temperature * left), 0.0)
        grad_p = (grad if gates is None else gates[t] * grad) - through_log
        grad_row = grad_row + p * (grad_p - (grad_p * p).sum(dim=-1, keepdim=True))
    return grad_row
