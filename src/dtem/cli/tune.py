"""Choose r for every block: the fastest plan on this machine with the least change of the model's output.

Costs are measured once and kept in the user's cache: without --data that is all, and --r 12ms or --r 1.8x then work in
every verb. With --data and --target, plans are compared on photographs (no labels) and the best one is timed. --save
stores it in an adapter file, for --r tuned. --curve tunes for the times of several constant r and compares both.
"""

import argparse

from dtem.cli import options
from dtem.cli.options import named
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report
from dtem.errors import require

HELP = "choose r for every block: a time on this machine, with the least change of the output"
EXAMPLES = """\
examples:
  dtem tune --model deit_tiny_patch16_224 --data photos --target 1.3x --save tuned.safetensors
  dtem tune --model deit_small_patch16_224 --data photos --target 200ms --batch-size 16 --plot plan.svg
  dtem tune --model deit_tiny_patch16_224 --data photos --test-data others --curve --plot curve.svg
  dtem tune --model deit_tiny_patch16_224                       measure costs: then --r 12ms and --r 1.8x work
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    options.add_model_options(parser)
    options.add_method_options(parser, several=False, method=None, r=None)
    add = parser.group("target").add_argument
    add("--target", metavar="COST", help="1.8x (as fast as unmerged), 12ms (one batch) or 0.8G (GFLOPs)")
    add("--curve", action="store_true", help="instead of a target: divergence against time, constant r and tuned")
    add("--data", metavar="DATA", help="photographs, without labels: a folder, timm:…, hf:…, wds:…")
    add("--limit", metavar="N", type=int, default=256, help="number of photographs; default %(default)s")
    add("--test-data", metavar="DATA", help="other photographs, to judge the plans on too")
    add = parser.group("run").add_argument
    add(
        "--batch-size",
        metavar="N",
        type=int,
        default=1,
        help="batch size that the model is served with; default %(default)s",
    )
    add("--engine", metavar="NAME", default="eager", help="eager, onnx or openvino; default %(default)s")
    add("--dtype", metavar="NAME", help="precision of an exported file: float32, bfloat16 or int8")
    add("--threads", metavar="N", type=int, help="CPU threads; default: torch's own choice")
    add("--save", metavar="FILE", help="write an adapter file with the plan, for --r tuned")
    add("--plot", metavar="FILE", help="draw the plan or the curve: .png, .svg or .pdf")
    add("--out", metavar="FILE", help="also write the result with its provenance (a record)")
    add = parser.group("run details", advanced=True).add_argument
    add("--refresh", action="store_true", help="measure the costs again")
    add("--rounds", metavar="N", type=int, help="timed rounds of the plans; default: some twenty seconds")


def run(args: argparse.Namespace) -> int:
    """Tune, print, write."""
    import dtem
    from dtem.measure import record

    if args.plot is not None:
        from dtem.visualise import curves

        curves.form_of(args.plot)
        require("matplotlib", "plot")
    args.r = "0"
    handle = options.build_handle(args)
    report = dtem.tune(
        handle,
        args.data,
        args.target,
        **named(args, "batch_size", "engine", "dtype", "threads", "limit", "test_data", "curve", "refresh", "rounds"),
    )
    print_report(args, report)
    if args.plot is not None and report.rows:
        report.save_plot(args.plot)
    if args.save is not None and not args.curve and report.rows:
        handle.save_pretrained(args.save)
    if args.out is not None:  # last: a file that cannot be written does not cost the numbers
        record.save(record.collect("tune", report.to_dict(), command=args.command), args.out)
    return 0
