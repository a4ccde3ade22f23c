"""Time merging against the unmerged model, in one run.

Contenders take turns (each round times all of them once, in changing order), and the speed-up is the median of the
ratios within rounds, with its quartiles. The unmerged model is timm's own, never patched; r=0 is the patched model
with nothing to merge. Peak memory is what one forward holds beyond weights and input: on CUDA as the allocator counts
it, on CPU the bytes of live tensors (not known for compiled models there).
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dtem.cli import common, segmentation

if TYPE_CHECKING:
    from torch import nn

    from dtem.handle import Handle

NAME = "bench"
HELP = "time r against the unmerged model: speed-up with spread, memory"
EXAMPLES = """\
examples:
  dtem bench deit_small_patch16_224 --r 0,8,13,16 --batch 1,32
  dtem bench deit_tiny_patch16_224 --r 16 --batch 32 --threads 2 --out tiny.json
  dtem bench deit_small_patch16_224 --r 16 --batch 128 --device cuda      the paper's own setting (RTX 3090, fp32)
"""
DTYPES = ("float32", "bfloat16", "float16")
UNMERGED = "unmerged"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    common.add_model_arguments(parser)
    common.add_weight_arguments(parser)
    parser.add_argument("--batch", metavar="LIST", default="1,32", help="batch sizes, with commas; default %(default)s")
    parser.add_argument("--rounds", metavar="N", type=int, default=10, help="timed rounds; default %(default)s")
    parser.add_argument("--warmup", metavar="N", type=int, default=2, help="rounds before; default %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--compile", action="store_true", help="torch.compile every contender, the unmerged one too")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads; default: torch's own choice")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of inputs and random weights; default 0")
    parser.add_argument("--out", metavar="FILE", help="also keep the result with its provenance (a record)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, keep."""
    import torch

    from dtem.measure import record
    from dtem.types import DtemError

    specs, batches = common.schedules(args.r), batch_sizes(args.batch)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DtemError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if args.threads is not None:
        if args.threads < 1:
            raise DtemError(f"--threads {args.threads} must be 1 or more")
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    host = segmentation.build_any(args).to(args.device, getattr(torch, args.dtype))
    handles = patched_copies(host, specs, functools.partial(common.patch, args))
    total = len(batches) * (args.rounds + args.warmup)
    with progress(total) as advance:
        rows = measure(host, handles, batches, args.rounds, args.warmup, args.compile, args.seed, advance)
    document = {
        "model": args.model,
        "method": handles[specs[0]].method.name,
        "adapter": args.adapter and record.plain_command(["", args.adapter])[1],
        "device": args.device,
        "dtype": args.dtype,
        "compile": args.compile,
        "shortcut": args.shortcut,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "rows": rows,
    }
    title = f"{args.model}, {document['method']}, {args.device}, {args.dtype}, threads: {document['threads']}"
    common.show(args, document, draw(title + (", compiled" if args.compile else ""), rows))
    if args.out is not None:  # last: a file that cannot be written does not cost the numbers
        record.save(record.collect("bench", document, seed=args.seed, command=args.command), args.out)
    return 0


def patched_copies(
    host: "nn.Module", specs: list[str], patch: Callable[["nn.Module"], "Handle"]
) -> dict[str, "Handle"]:
    """A copy of `host` for each schedule, each freshly patched: nothing that one of them keeps helps another."""
    handles = {}
    for spec in specs:
        handles[spec] = patch(copy.deepcopy(host))
        handles[spec].r = spec
    return handles


def measure(
    host: "nn.Module",
    handles: dict[str, "Handle"],
    batches: list[int],
    rounds: int,
    warmup: int,
    compiled: bool = False,
    seed: int = 0,
    advance: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Time `host` against its patched copies, by schedule. One row per batch and contender."""
    import torch

    from dtem import adapters
    from dtem.measure import flops, throughput

    image = next(iter(handles.values())).host.image
    models = {UNMERGED: host, **{spec: handle.model for spec, handle in handles.items()}}
    macs = {name: flops.count(model, image).macs for name, model in models.items()}
    weight = next(host.parameters())
    rows = []
    for size in batches:
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(size, *image, generator=generator).to(weight.device, weight.dtype)
        calls: dict[str, Any] = {name: adapters.asked(model) for name, model in models.items()}
        if compiled:
            torch.compiler.reset()  # a graph for this batch size, not one for all
            calls = {name: torch.compile(call, dynamic=False) for name, call in calls.items()}
        timings = throughput.compare(calls, batch, rounds, warmup, progress=advance)
        for name, timing in timings.items():
            known = batch.is_cuda or not compiled
            rows.append(
                {
                    "batch": size,
                    "r": None if name == UNMERGED else name,
                    "macs": macs[name],
                    "macs_ratio": macs[UNMERGED] / macs[name],
                    "images_per_second": timing.images_per_second,
                    "seconds": timing.seconds,
                    "speedup": dataclasses.asdict(timing.speedup),
                    "peak_bytes": throughput.peak_bytes(calls[name], batch) if known else None,
                }
            )
    return rows


def draw(title: str, rows: list[dict[str, Any]]) -> object:
    """The rows of `measure` as a table."""
    return common.table(
        title,
        ("batch", "r", "GFLOPs (MACs)", "MACs ratio", "im/s", "latency ms", "speed-up (quartiles)", "peak memory MB"),
        [
            (
                str(row["batch"]),
                UNMERGED if row["r"] is None else row["r"],
                common.giga(row["macs"]),
                f"{row['macs_ratio']:.2f}",
                f"{row['images_per_second']:.1f}",
                f"{1000 * row['seconds']:.2f}",
                "{median:.2f} ({low:.2f} – {high:.2f})".format(**row["speedup"]),
                "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}",
            )
            for row in rows
        ],
    )


def batch_sizes(text: str) -> list[int]:
    """The numbers of `--batch`, each once."""
    from dtem.types import DtemError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"--batch {text} is not a list of batch sizes; write for instance 1,32")
    return list(dict.fromkeys(map(int, parts)))


@contextlib.contextmanager
def progress(total: int, doing: str = "timing") -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal. It draws between rounds only: a thread would be timed too."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(doing, total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance
