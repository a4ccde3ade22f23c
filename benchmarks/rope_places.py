"""Where a merged token of a host with rotary positions is: at the mean of its patches, or where its larger part was.

python -m benchmarks.rope_places --data DIR/val --weights host.safetensors

The host is that of `benchmarks.rope_host`, trained for this. Merging is ToMe's, the ways differ in positions alone. On
the same photographs: top-1, cross-entropy and divergence from the unmerged host, and their paired differences.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtem
from benchmarks import common, rope_host
from benchmarks.norms import scores
from dtem import ops
from dtem.integrations.rotary import CHANNELS
from dtem.integrations.timm_eva import TimmEva
from dtem.measure.statistics import mean_difference
from dtem.methods.base import full_size
from dtem.methods.tome import Tome
from dtem.models.weights import load_weights
from dtem.types import Taps, Tokens

RATES = (8, 16)
METRICS = ("top1", "cross_entropy", "kl")


class LargerPlace(Tome):
    """ToMe, except that a merged token keeps the position of its larger part (of equal ones, the receiving token's)."""

    name = "tome_larger_place"

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        merged = super().reduce(layer, tokens, taps, r)
        if r == 0:
            return merged
        matching = ops.match(self.metric(layer, taps), r, self.host.prefix)
        places = larger_places(tokens.x[..., -CHANNELS:], full_size(tokens), matching)
        return merged.replace(x=torch.cat([merged.x[..., :-CHANNELS], places], dim=2))


def larger_places(places: Tensor, size: Tensor, matching: ops.Matching) -> Tensor:
    """The place (b, m, 2) of the largest of the tokens that each token of the output is made of."""
    kept, own = ops.take(places, matching.kept), size.gather(1, matching.kept)
    moved = size.gather(1, matching.merged)
    largest = own.scatter_reduce(1, matching.into, moved, "amax")
    wins = (moved == largest.gather(1, matching.into)) & (moved > own.gather(1, matching.into))
    left = kept.shape[1]
    into = torch.where(wins, matching.into, left).unsqueeze(2).expand(-1, -1, CHANNELS)  # others into a row to drop
    return torch.nn.functional.pad(kept, (0, 0, 0, 1)).scatter(1, into, ops.take(places, matching.merged))[:, :left]


class NoPlace(Tome):
    """ToMe with every token at row 0, column 0 after the first merge: what positions are worth to this host."""

    name = "tome_no_place"

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        merged = super().reduce(layer, tokens, taps, r)
        return merged.replace(x=torch.cat([merged.x[..., :-CHANNELS], 0 * merged.x[..., -CHANNELS:]], dim=2))


WAYS = {"mean of its patches": "tome", "place of its larger part": LargerPlace.name, "no places": NoPlace.name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="photographs; default: all")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for cls in (LargerPlace, NoPlace):
        dtem.register_method(cls)
    TimmEva.methods = frozenset({*(TimmEva.methods or ()), *WAYS.values()})
    handles = {way: dtem.patch(host(args.weights), method) for way, method in WAYS.items()}
    common.save_record("rope_places", measure(args, handles), args)
    return 0


def host(weights: Path) -> torch.nn.Module:
    model = rope_host.create()
    load_weights(model, weights)
    model.eval()
    return model


@torch.inference_mode()
def measure(args: argparse.Namespace, handles: dict[str, dtem.Handle]) -> list[dict[str, Any]]:
    first = next(iter(handles))
    unmerged_host = host(args.weights)
    outcomes: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for batch in common.open_images(unmerged_host, args.data, limit=args.limit).epoch(0):
        unmerged = unmerged_host(batch.images).log_softmax(dim=1)
        outcomes["unmerged", 0].append(scores(unmerged, unmerged, batch.labels))
        for way, handle in handles.items():
            for r in RATES:
                with handle.at(r=r):
                    merged = handle.model(batch.images).log_softmax(dim=1)
                outcomes[way, r].append(scores(merged, unmerged, batch.labels))
        print(".", end="", file=sys.stderr, flush=True)
    pooled = {key: torch.cat(parts, dim=1).double() for key, parts in outcomes.items()}
    rows = []
    for (way, r), values in pooled.items():
        row: dict[str, Any] = {"way": way, "r": r, "images": values.shape[1]}
        row |= dict(zip(METRICS, values.mean(dim=1).tolist(), strict=True))
        if way not in ("unmerged", first):
            for index, metric in enumerate(METRICS):
                difference = mean_difference(values[index] - pooled[first, r][index])
                row[f"{metric}_difference"] = [difference.value, difference.low, difference.high]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(common.run(main))
