"""Time merging against the unmerged model, in one run.

Variants take turns (each round times all of them once, in changing order), and the speed-up is the median of the
ratios within rounds, with its quartiles. The unmerged model is the library's own, never patched; r=0 is the patched
model with nothing to merge. Peak memory is what one forward holds beyond weights and input: on CUDA as the allocator
counts it, on CPU the bytes of live tensors (known for the engine eager only).
"""

import argparse

from dtem.cli.options import DEFAULT_MODEL, add_method_options, add_model_options, model_options, named
from dtem.cli.parser import VerbParser, batch_sizes
from dtem.cli.printing import print_report
from dtem.errors import DtemError
from dtem.tables import Report

BATCH_SIZES = "1,32"
HELP = "time r against the unmerged model: speed-up with spread, memory"
EXAMPLES = """\
examples:
  dtem bench --model deit_small_patch16_224 --r 0,8,13,16 --batch-size 1,32
  dtem bench --model deit_tiny_patch16_224 --random-weights --r 16 --threads 2 --out tiny.json
  dtem bench --model deit_small_patch16_224 --r 13,16 --batch-size 1 --engine openvino
  dtem bench --device cuda --recipe paper             the paper's throughput table, measured again
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add_model_options(parser, default=None)
    add_method_options(parser, several=False, method=None, r="0,8,16", several_r=True)
    add = parser.group("run").add_argument
    text = "the paper's throughput table: its models (--model DeiT-S: one of them), r and batch size (128)"
    add("--recipe", choices=("paper",), help=text)
    add("--batch-size", metavar="LIST", help=f"with commas; default {BATCH_SIZES}")
    add("--rounds", metavar="N", type=int, default=10, help="timed rounds; default %(default)s")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    text = "eager, compile (torch.compile), onnx (onnxruntime) or openvino; default eager"
    add("--engine", metavar="NAME", default="eager", help=text)
    text = "float32, bfloat16, float16 or int8, as the engine has them; default float32"
    add("--dtype", metavar="NAME", default="float32", help=text)
    add("--threads", metavar="N", type=int, help="CPU threads; default: torch's own choice")
    add(
        "--oracle",
        action="store_true",
        help="also time dropping as many tokens at fixed positions: the limit of merging",
    )
    add("--out", metavar="FILE", help="also write the result with its provenance (a record)")
    add = parser.group("run details", advanced=True).add_argument
    add("--warmup", metavar="N", type=int, default=2, help="untimed rounds before; default %(default)s")
    add("--seed", metavar="N", type=int, default=0, help="of images and random weights; default %(default)s")


def _benchmark(args: argparse.Namespace) -> Report:
    from dtem.evaluation.benchmark import benchmark

    return benchmark(
        args.model or DEFAULT_MODEL,
        args.r,
        batch_size=batch_sizes("--batch-size", args.batch_size or BATCH_SIZES),
        **named(args, "method", "adapter", "shortcut", "rounds", "warmup", "engine", "oracle"),
        **named(args, "device", "dtype", "threads", "seed"),
        **model_options(args),
    )


def _paper(args: argparse.Namespace) -> Report:
    from dtem.evaluation.paper_speed import BATCH_SIZE, benchmark_paper

    sizes = batch_sizes("--batch-size", args.batch_size or str(BATCH_SIZE))
    if len(sizes) != 1:
        raise DtemError(f"--batch-size {args.batch_size}: --recipe paper takes one")
    models = None if args.model is None else [args.model]
    shared = named(args, "rounds", "warmup", "device", "dtype", "oracle")
    return benchmark_paper(models, batch_size=sizes[0], **shared)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the record."""
    from dtem.measure import record

    report = _paper(args) if args.recipe == "paper" else _benchmark(args)
    print_report(args, report)
    if args.out is not None:  # last: a file that cannot be written does not cost the numbers
        record.save(record.collect("bench", report.to_dict(), seed=args.seed, command=args.command), args.out)
    return 0
