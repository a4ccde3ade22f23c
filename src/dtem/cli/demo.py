"""See merging work, offline, in about a minute: two checks and a small benchmark on DeiT-T.

The weights are random, so this shows what merging does and what it saves, not how accurate it is.
"""

import argparse
import copy
from typing import TYPE_CHECKING, Any

from dtem.cli import bench, common

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "demo"
HELP = "two checks and a small benchmark, offline"
EXAMPLES = """\
examples:
  dtem demo
  dtem demo --rounds 10 --json
"""
MODEL = "deit_tiny_patch16_224"
SCHEDULES = ["0", "8", "13", "16"]
NOTE = "The weights are random: speed and counts are real, accuracy would mean nothing."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="timed rounds; default %(default)s")
    parser.add_argument("--batch", metavar="N", type=int, default=8, help="images per forward; default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Check, measure, print. Returns 1 if a check fails."""
    import torch

    import dtem

    batches = bench.batch_sizes(str(args.batch))
    torch.manual_seed(0)
    host = common.create(MODEL)
    checks = [
        {"check": "at r = 0 the patched model's output is the host's, bit by bit", "passed": unchanged(host)},
        {"check": "untrained, dtem merges the same patches as tome in every block", "passed": same_merges(host)},
    ]
    handles = bench.patched_copies(host, SCHEDULES, dtem.patch)
    counts = []
    for spec, handle in handles.items():
        count = common.count(handle)
        counts.append({"r": spec, "tokens": handle.tokens[-1], "macs": count.macs, "paper": count.paper})
    with bench.progress(args.rounds + 1) as advance:
        rows = bench.measure(host, handles, batches, args.rounds, 1, advance=advance)
    document = {
        "model": MODEL,
        "note": NOTE,
        "checks": checks,
        "counts": counts,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    common.show(args, document, *_parts(document))
    return 0 if all(check["passed"] for check in checks) else 1


def unchanged(host: "nn.Module") -> bool:
    """Whether the patched host, at r = 0, gives the host's own output."""
    import torch

    import dtem

    images = _images(2)
    model = copy.deepcopy(host)
    dtem.patch(model, r=0)
    with torch.inference_mode():
        return torch.equal(model(images), host(images))


def same_merges(host: "nn.Module") -> bool:
    """Whether dtem and tome put every patch into the same token, block by block.

    In float64: both compute the same metric, in different order, and float32 rounding could swap near-equal edges.
    """
    import torch

    import dtem

    sources = []
    for method in ("dtem", "tome"):
        model = copy.deepcopy(host).double()
        with torch.inference_mode(), dtem.patch(model, method=method, r=16).trace() as trace:
            model(_images(2).double())
        sources.append(trace.sources)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(*sources, strict=True)) and bool(sources[0])


def _images(count: int) -> "Tensor":
    import torch

    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def _parts(document: dict[str, Any]) -> list[object]:
    lines = [f"{'ok    ' if check['passed'] else 'FAILED'}  {check['check']}" for check in document["checks"]]
    counts = common.table(
        f"{MODEL}: what is counted",
        ("r", "tokens after the last block", "GFLOPs (MACs)", "GFLOPs (paper)"),
        [
            (row["r"], str(row["tokens"]), common.giga(row["macs"]), common.giga(row["paper"]))
            for row in document["counts"]
        ],
    )
    timed = bench.draw(f"{MODEL}: what is timed (cpu, float32, threads: {document['threads']})", document["rows"])
    return [NOTE, "", *lines, "", counts, timed]
