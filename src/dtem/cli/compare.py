"""Methods at equal cost, on the same images: accuracy, the difference from ToMe image by image, and speed.

Every method gets the schedule that meets each budget, in the blocks that it works in. Methods with trained parts take
part with an adapter; without one they are named and left out.
"""

import argparse

from dtem.cli import options, printing
from dtem.cli.parser import VerbParser, batch_sizes

HELP = "all methods at equal GFLOPs, on the same images"
EXAMPLES = """\
examples:
  dtem compare --model deit_tiny_patch16_224 --data imagenet/val --gflops 0.65,0.81
  dtem compare --model deit_tiny_patch16_224 --data imagenet/val --gflops 0.65 --adapter dtem=my.safetensors
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    options.add_model_options(parser, default=None)
    options.add_evaluation_options(parser)
    options.add_method_options(parser, several=True, method=None, r=None)
    add = parser.group("merging").add_argument
    add("--gflops", metavar="LIST", required=True, help="budgets in GFLOPs (MACs convention), several with commas")
    options.add_run_options(parser)
    add = parser.group("run").add_argument
    text = "batch sizes to time, with commas; none: no timing; default %(default)s"
    add("--timed-batch-size", metavar="LIST", default="1,32", help=text)
    add("--rounds", metavar="N", type=int, default=10, help="timed rounds; default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Compare, print, plot."""
    shared = options.evaluation_options(args)
    sizes = [] if args.timed_batch_size == "none" else batch_sizes("--timed-batch-size", args.timed_batch_size)
    from dtem.evaluation.compare import compare

    report = compare(args.model, args.data, args.gflops, timed_batch_size=sizes, rounds=args.rounds, **shared)
    printing.print_report(args, report)
    if args.plot is not None:  # last: a file that cannot be written does not cost the numbers
        report.save_plot(args.plot)
    return 0
