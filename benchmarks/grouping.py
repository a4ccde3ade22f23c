"""Soft grouping against the literal loop of its equation: time of forward + backward, and bytes kept for backward.

python -m benchmarks.grouping        batch 64, 197 tokens, r = 16
"""

import argparse
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import common
from dtem import ops
from dtem.measure import throughput


def literal(similarity: Tensor, r: int, temperature: float = 0.1, scale: float = 0.1) -> Tensor:
    """Equation 3-5 of the paper, word for word, on whole matrices."""
    scores = similarity / scale
    total = torch.zeros_like(scores)
    for _ in range(r):
        step = (scores / temperature).flatten(1).softmax(dim=1).view_as(scores)
        total = total + step
        scores = scores + (1 - step.sum(dim=2, keepdim=True)).clamp(min=torch.finfo(scores.dtype).eps).log()
    return total / total.sum(dim=2, keepdim=True).detach().clamp(min=1.0)


def saved_bytes(group: Callable[[Tensor], Tensor], similarity: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, each piece of memory counted once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        edges = group(similarity)
    assert edges.requires_grad
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    z = torch.randn(args.batch, args.tokens, 64)
    similarity = ops.cosine(z, prefix=1).requires_grad_()

    upstream = torch.randn_like(similarity)

    def step(group: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
        def run(_: Tensor) -> object:
            with torch.inference_mode(False), torch.enable_grad():
                return torch.autograd.grad(group(similarity), similarity, upstream)

        return run

    groups = {
        "literal": lambda s: literal(s, args.r),
        "factorised": lambda s: ops.soft_group(s, args.r),
        "factorised, 3 candidates": lambda s: ops.soft_group(s, args.r, candidates=3),
    }
    timing = throughput.compare({name: step(group) for name, group in groups.items()}, z, args.rounds)
    rows = [
        {
            "name": name,
            "batch": args.batch,
            "tokens": args.tokens,
            "r": args.r,
            "milliseconds": 1e3 * timing[name].seconds,
            "speedup": dataclasses.asdict(timing[name].speedup),
            "saved_bytes": saved_bytes(group, similarity),
        }
        for name, group in groups.items()
    ]
    for row in rows:
        row["fewer_bytes"] = rows[0]["saved_bytes"] / row["saved_bytes"]
        print(
            f"{row['name']:25} {row['milliseconds']:8.1f} ms, {common.spread(row['speedup'])} × the literal loop, "
            f"{row['saved_bytes'] / 1e6:.1f} MB saved ({row['fewer_bytes']:.1f} × fewer)"
        )
    common.save_record("grouping", rows, args)


if __name__ == "__main__":
    main()
