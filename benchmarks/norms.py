"""Norms that know about merging: what embeddings and norms each bring, at every r, and the shift that norms see.

python -m benchmarks.norms --data DIR/val --weights FILE
python -m benchmarks.norms --data DIR/val --weights FILE --tome-norms runs/tome/adapter.safetensors

DIR/val holds photographs that the adapter was not trained on. The rows: ToMe, the adapter's embeddings alone, ToMe with
norms of its own (an adapter by `dtem train --preset adapter --method tome`), and the whole adapter.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtem
from benchmarks import common
from dtem.measure.statistics import mean_difference

RATES = (4, 8, 13, 16, 20)
SIZES = {"1": (1, 1), "2 to 3": (2, 3), "4 and more": (4, 10**6)}
"""Classes of token sizes."""
IMAGES_OF_THE_SHIFT = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--adapter", help="default: the shipped one")
    parser.add_argument("--tome-norms", help="an adapter of method tome with norms")
    parser.add_argument("--name", help="of the record; default norms_MODEL")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    adapter = args.adapter or args.model
    variants: dict[str, Callable[[torch.nn.Module], dtem.Handle]] = {
        "tome": lambda model: dtem.patch(model, "tome"),
        "embeddings": lambda model: dtem.from_pretrained(adapter, model, norms=False),
        "both": lambda model: dtem.from_pretrained(adapter, model),
    }
    if args.tome_norms:
        variants["tome + norms"] = lambda model: dtem.from_pretrained(args.tome_norms, model)
    handles = {
        name: make(dtem.create_model(args.model, weights=args.weights).eval()) for name, make in variants.items()
    }
    rows = accuracy(args, handles) + [shift(args, name, handle) for name, handle in handles.items()]
    common.save_record(args.name or f"norms_{args.model}", rows, args)
    return 0


@torch.inference_mode()
def accuracy(args: argparse.Namespace, handles: dict[str, dtem.Handle]) -> list[dict[str, Any]]:
    """Top-1, cross-entropy and KL divergence from the unmerged model, per photograph and paired with ToMe."""
    host = dtem.create_model(args.model, weights=args.weights).eval()
    outcomes: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for batch in common.open_images(host, args.data).epoch(0):
        unmerged = host(batch.images).log_softmax(dim=1)
        outcomes["unmerged", 0].append(scores(unmerged, unmerged, batch.labels))
        for name, handle in handles.items():
            for r in RATES:
                with handle.at(r=r):
                    merged = handle.model(batch.images).log_softmax(dim=1)
                outcomes[name, r].append(scores(merged, unmerged, batch.labels))
        print(".", end="", file=sys.stderr, flush=True)
    pooled = {key: torch.cat(parts, dim=1).double() for key, parts in outcomes.items()}
    table = []
    for (name, r), values in pooled.items():
        row = {"variant": name, "r": r, "images": values.shape[1]}
        row |= dict(zip(("top1", "cross_entropy", "kl"), values.mean(dim=1).tolist(), strict=True))
        if name not in ("unmerged", "tome"):
            for index, metric in enumerate(("top1", "cross_entropy", "kl")):
                difference = mean_difference(values[index] - pooled["tome", r][index])
                row[f"{metric}_gain"] = [difference.value, difference.low, difference.high]
        table.append(row)
    return table


def scores(logs: Tensor, unmerged: Tensor, labels: Tensor) -> Tensor:
    """Of every image: 100 if right, cross-entropy, KL divergence from the unmerged model, (3, b)."""
    right = 100.0 * (logs.argmax(dim=1) == labels)
    entropy = -logs.gather(1, labels.unsqueeze(1)).squeeze(1)
    return torch.stack([right, entropy, (unmerged.exp() * (unmerged - logs)).sum(dim=1)])


@torch.inference_mode()
def shift(args: argparse.Namespace, name: str, handle: dtem.Handle, r: int = 16) -> dict[str, Any]:
    """Standard deviation over the channels of the tokens that the second norm of every block reads, by token size."""
    read: list[Tensor] = []
    norms = [block.norm2 for block in handle.model.blocks]
    hooks = [norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].std(dim=2))) for norm in norms]
    spreads: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    loader = common.open_images(handle.model, args.data, limit=IMAGES_OF_THE_SHIFT)
    for batch in loader.epoch(0):
        read.clear()
        with handle.at(r=r), handle.trace() as trace:
            handle.model(batch.images)
        prefix = handle.host.prefix
        for layer, (spread, sizes) in enumerate(zip(read, trace.sizes, strict=True)):
            for label, (low, high) in SIZES.items():
                chosen = (sizes[:, prefix:] >= low) & (sizes[:, prefix:] <= high)
                spreads[layer, label].append(spread[:, prefix:][chosen])
    for hook in hooks:
        hook.remove()
    means = {label: [torch.cat(spreads[layer, label]).mean().item() for layer in range(len(norms))] for label in SIZES}
    return {"variant": name, "r": r, "spread_by_size": means, "images": IMAGES_OF_THE_SHIFT}


if __name__ == "__main__":
    sys.exit(common.run(main))
