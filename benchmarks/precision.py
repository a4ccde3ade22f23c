"""What half precision changes: logits against float32, and which tokens are merged.

Block by block, both models see the same tokens: the half one is forced to merge what float32 merges, and its own
matching is recorded. Where that differs, the gap is the difference in cosine by which float32 prefers its own choice: a
near tie has a gap of rounding size. Logits are compared with every model merging as it likes.

python -m benchmarks.precision --weights deit_tiny.safetensors --data imagenet/val --images 64
"""

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from dtem import ops

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NEAR = 0.02
"""Edges whose cosines differ by less than this nearly tie."""


@dataclass
class Choice:
    """Metric and matching of one block."""

    metric: Tensor
    prefix: int
    matching: ops.Matching


@contextlib.contextmanager
def watched(force: list[Choice] | None = None) -> Iterator[list[Choice]]:
    """Record every matching; with `force`, the model uses those instead."""
    real: Callable[..., ops.Matching] = ops.match
    seen: list[Choice] = []

    def match(metric: Tensor, r: int, prefix: int = 0) -> ops.Matching:
        seen.append(Choice(metric, prefix, real(metric, r, prefix)))
        return seen[-1].matching if force is None else force[len(seen) - 1].matching

    def match_and_merge(
        x: Tensor, size: Tensor | None, metric: Tensor, r: int, prefix: int = 0
    ) -> tuple[Tensor, Tensor]:
        return ops.merge(x, size, match(metric, r, prefix))

    with mock.patch.multiple(ops, match=match, match_and_merge=match_and_merge):
        yield seen


def compare(exact: Choice, half: Choice) -> tuple[int, list[float]]:
    """How many tokens are merged, and the gaps of those that the half model merges otherwise (token or partner)."""
    prefix = exact.prefix
    first, second = prefix + prefix % 2, prefix + 1 - prefix % 2
    z = torch.nn.functional.normalize(exact.metric.double(), dim=-1)
    similarity = z[:, first::2] @ z[:, second::2].mT
    total, gaps = 0, []
    for image, table in enumerate(similarity):
        ours, theirs = (_edges(choice, image, first, second) for choice in (exact, half))
        total += len(ours)
        weakest = min((float(table[a, b]) for a, b in ours.items()), default=0.0)
        for a, b in theirs.items() - ours.items():
            # By how much float32 finds this edge weaker than what it took itself.
            gaps.append((float(table[a, ours[a]]) if a in ours else weakest) - float(table[a, b]))
    return total, gaps


def _edges(choice: Choice, image: int, first: int, second: int) -> dict[int, int]:
    """Places on side A that merge, with the places on side B that they join."""
    kept = choice.matching.kept[image].tolist()
    merged, into = choice.matching.merged[image].tolist(), choice.matching.into[image].tolist()
    return {(a - first) // 2: (kept[b] - second) // 2 for a, b in zip(merged, into, strict=True)}


@torch.no_grad()
def probe(model: nn.Module, images: Tensor, dtype: torch.dtype, autocast: bool = False) -> dict[str, float]:
    """Half precision against float32, for a patched model: the whole model in `dtype`, or autocast to it."""
    half = copy.deepcopy(model)
    half = half if autocast else half.to(dtype)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=autocast):
            return half(images if autocast else images.to(dtype)).float()

    with watched() as exact:
        expected = model(images)
    with watched(force=exact) as choices:
        run()
    counts = [compare(*pair) for pair in zip(exact, choices, strict=True)]
    merged = sum(total for total, _ in counts)
    gaps = [gap for _, gaps_of_block in counts for gap in gaps_of_block]
    logits = run()
    difference = (logits - expected).abs().amax(dim=1)
    return {
        "images": len(images),
        "merged_the_same": 1 - len(gaps) / merged,
        "not_near": sum(gap > NEAR for gap in gaps) / merged,
        "largest_gap": max(gaps, default=0.0),
        "typical_difference": float(difference.median()),
        "largest_difference": float(difference.max()),
        "logit_range": float(expected.max() - expected.min()),
        "same_class": int((logits.argmax(dim=1) == expected.argmax(dim=1)).sum()),
    }


def main() -> None:
    import dtem
    from benchmarks import common

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--adapter", default="deit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--r", default="13")
    common.add_arguments(parser)
    args = parser.parse_args()
    host = dtem.create_model(args.model, weights=args.weights)
    loader = common.open_images(host, args.data, 64, limit=args.images)
    images = torch.cat([batch.images for batch in loader.epoch(0)])
    handle = dtem.from_pretrained(args.adapter, host, r=0)
    rows = []
    for r in map(int, args.r.split(",")):
        handle.r = r
        for name, dtype in DTYPES.items():
            for autocast in (False, True):
                measured = probe(host, images, dtype, autocast)
                rows.append({"model": args.model, "r": r, "dtype": name, "autocast": autocast, **measured})
                print(rows[-1], flush=True)
    common.save_record("precision", rows, args)


if __name__ == "__main__":
    main()
