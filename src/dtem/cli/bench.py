"""Time merging against the unmerged model, in one run.

Variants take turns (each round times all of them once, in changing order), and the speed-up is the median of the
ratios within rounds, with its quartiles. The unmerged model is the library's own, never patched; r=0 is the patched
model with nothing to merge. Peak memory is what one forward holds beyond weights and input: on CUDA as the allocator
counts it, on CPU the bytes of live tensors (not known for compiled models there).
"""

import argparse

from dtem.cli.options import add_method_options, add_model_options, model_options, named
from dtem.cli.parser import VerbParser, batch_sizes
from dtem.cli.printing import print_report
from dtem.evaluation import DTYPES

HELP = "time r against the unmerged model: speed-up with spread, memory"
EXAMPLES = """\
examples:
  dtem bench --model deit_small_patch16_224 --r 0,8,13,16 --batch-size 1,32
  dtem bench --model deit_tiny_patch16_224 --random-weights --r 16 --threads 2 --out tiny.json
  dtem bench --model deit_small_patch16_224 --r 16 --batch-size 128 --device cuda      the paper's own setting
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add_model_options(parser)
    add_method_options(parser, several=False, method=None, r="0,8,16", several_r=True)
    add = parser.group("run").add_argument
    add("--batch-size", metavar="LIST", default="1,32", help="with commas; default %(default)s")
    add("--rounds", metavar="N", type=int, default=10, help="timed rounds; default %(default)s")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights and images; default %(default)s")
    add("--threads", metavar="N", type=int, help="CPU threads; default: torch's own choice")
    add("--out", metavar="FILE", help="also write the result with its provenance (a record)")
    add = parser.group("run details", advanced=True).add_argument
    add("--warmup", metavar="N", type=int, default=2, help="untimed rounds before; default %(default)s")
    add("--compile", action="store_true", help="torch.compile every variant, the unmerged one too")
    add("--seed", metavar="N", type=int, default=0, help="of images and random weights; default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the record."""
    from dtem.evaluation.benchmark import benchmark
    from dtem.measure import record

    report = benchmark(
        args.model,
        args.r,
        batch_size=batch_sizes("--batch-size", args.batch_size),
        **named(args, "method", "adapter", "shortcut", "rounds", "warmup", "compile"),
        **named(args, "device", "dtype", "threads", "seed"),
        **model_options(args),
    )
    print_report(args, report)
    if args.out is not None:  # last: a file that cannot be written does not cost the numbers
        record.save(record.collect("bench", report.to_dict(), seed=args.seed, command=args.command), args.out)
    return 0
