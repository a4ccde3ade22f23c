"""Accuracy with and without merging, on labelled images; for a Segmenter mean IoU, for a captioner caption metrics.

All variants run on the same images, so that differences come with narrow 95 % intervals. Images that an adapter lists
as its training images are left out for all.
"""

import argparse

from dtem.cli import options, printing
from dtem.cli.parser import VerbParser, image_size
from dtem.errors import DtemError

HELP = "accuracy at each r, compared image by image"
EXAMPLES = """\
examples:
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --r 8,13,16 --out results --plot curve.png
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --adapter a=one.safetensors --adapter b=two.safetensors
  dtem eval --model seg_s_mask_16 --weights seg.pth --data ade20k:ADE#validation --short-side 512 --r 20%,40%
  dtem eval --model microsoft/git-base-coco --data "coco/dataset_coco.json#test?images=coco" --r 4,8
  dtem eval --compare results/tome-r16.safetensors results/dtem-r16.safetensors
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    options.add_model_options(parser, default=None)
    options.add_evaluation_options(parser)
    parser.group("data").add_argument(
        "--compare", metavar="FILE", nargs=2, help="compare two files of --out, second minus first"
    )
    by_task = "8,13,16 (Segmenter: 20%,30%,40%,50%; captioner: 4,8,10,13)"
    options.add_method_options(parser, several=True, method="tome", r=by_task)
    parser.set_defaults(r=None)
    options.add_run_options(parser, batch_size=None)
    add = parser.group("k-NN", advanced=True).add_argument
    add("--knn", metavar="SPEC", help="evaluate features, by their nearest neighbours among these labelled images")
    add("--num-neighbours", metavar="N", type=int, default=10, help="default %(default)s")
    add = parser.group("segmentation", advanced=True).add_argument
    add("--short-side", metavar="N", type=int, default=0, help="resize to this short side first (ADE20K: 512)")
    add("--window", metavar="N", help="sliding window, 512 or 256x320; default: whole image at once")
    add("--stride", metavar="N", help="of the window; default: the window, without overlap")
    add = parser.group("captioning", advanced=True).add_argument
    options.add_generation_options(add)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, plot."""
    if args.compare is not None:
        from dtem.evaluation.classification import compare_outcomes

        printing.print_report(args, compare_outcomes(*args.compare))
        return 0
    shared = options.evaluation_options(args)
    if args.plot is not None and args.r == "0":
        raise DtemError("--plot: there is nothing to draw, --r 0 merges nothing")
    from dtem.evaluation.evaluate import evaluate

    report = evaluate(
        args.model,
        args.data,
        args.r,
        window=image_size("--window", args.window),
        stride=image_size("--stride", args.stride),
        **options.named(args, "knn", "num_neighbours", "short_side"),
        **options.named(args, "num_beams", "max_new_tokens", "proportional_decoder"),
        **shared,
    )
    printing.print_report(args, report)
    if args.plot is not None:  # last: a file that cannot be written does not cost the numbers
        report.save_plot(args.plot)
    return 0
