"""All methods at equal cost, on the same images: accuracy, and the difference to ToMe image by image.

Every method gets the plan that meets each budget (its own r per block, in the blocks that it works in). Methods with
trained parts take part with an adapter; without one they are named and left out, for an untrained predictor says
nothing about its method.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtem.cli import common, evaluate, outcome_tables
from dtem.cli.contenders import REFERENCE, split_label

if TYPE_CHECKING:
    from dtem.measure.throughput import Timing

NAME = "compare"
HELP = "all methods at equal GFLOPs, on the same images"
EXAMPLES = """\
examples:
  dtem compare --model deit_tiny_patch16_224 --data imagenet/val --gflops 0.65,0.81
  dtem compare --model deit_tiny_patch16_224 --data imagenet/val --gflops 0.65 --adapter dtem=my.safetensors
"""
TOLERANCE = 0.01
"""A contender further than this from its budget is marked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    evaluate.add_shared_arguments(parser)
    add = parser.add_argument
    add("--gflops", metavar="LIST", required=True, help="budgets in GFLOPs (MACs convention), several with commas")
    add("--method", metavar="LIST", help="with commas; default: all that need no training, and those of --adapter")
    add("--time", metavar="LIST", default="1,32", help="batch sizes to time, interleaved; 0: none; default %(default)s")
    add("--rounds", metavar="N", type=int, default=10, help="timed rounds; default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Compare, print, keep."""
    from dtem.types import DtemError

    budgets = numbers("--gflops", args.gflops)
    sizes = [int(size) for size in numbers("--time", args.time) if size]
    args.r = ",".join(f"{budget:g}G" for budget in budgets)
    left_out: dict[str, str] = {}
    if args.method is None:
        args.method, left_out = all_methods(args)
    found = evaluate.measure(args)
    if len(found.contenders) == 1:
        full = common.giga(found.contenders[0].macs)
        raise DtemError(f"--gflops {args.gflops} merges nothing: the unmerged model takes {full} GFLOPs itself")
    document = complete(found, sizes, args.rounds)
    document["budgets"] = budgets
    document["not_compared"] = left_out
    common.show(args, document, *outcome_tables.draw(document), *_tables(document, sizes))
    evaluate.keep(args, document, found.outcomes)
    return 0


def complete(found: evaluate.Measured, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """What was measured, with how far each is from its budget and how much faster than the unmerged model."""
    document = found.document
    for one in document["rows"][1:]:
        budget = float(one["r"].removesuffix("G")) * 1e9
        one["off_budget"] = one["macs"] / budget - 1
    timings = {size: _timed(found, size, rounds) for size in sizes}
    for contender, one in zip(found.contenders, document["rows"], strict=True):
        timed = {str(size): timings[size][contender.name] for size in sizes}
        one["speedup"] = {size: dataclasses.asdict(timing.speedup) for size, timing in timed.items()}
        one["images_per_second_at"] = {size: timing.images_per_second for size, timing in timed.items()}
    return document


def numbers(option: str, text: str) -> list[float]:
    """Positive numbers with commas between."""
    from dtem.types import DtemError

    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0 or (option == "--gflops" and min(numbers) == 0):
        raise DtemError(f"{option} {text} must be positive numbers with commas between, such as 0.65,0.81")
    return numbers


def all_methods(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Methods that can run on this host as they are, and why the others cannot."""
    import torch

    import dtem
    from dtem.methods import METHODS
    from dtem.types import DtemError

    served = {split_label(given)[0] for given in args.adapter}
    chosen, left_out = [REFERENCE], {}
    for name in METHODS:
        with torch.device("meta"):
            host = common.build(argparse.Namespace(**{**vars(args), "weights": None, "pretrained": False}))
        try:
            handle = dtem.patch(host, name)
        except DtemError as error:
            left_out[name] = str(error)
            continue
        if any(True for _ in handle.method.parameters()):
            if name not in served:
                left_out[name] = f"it has trained parts: give them with --adapter {name}=FILE"
        elif name not in chosen and not handle.method.can_relax():  # else it differs in training only
            chosen.append(name)
    return ",".join(chosen), left_out


def _timed(found: evaluate.Measured, size: int, rounds: int) -> dict[str, "Timing"]:
    """All contenders at one batch size."""
    import torch

    from dtem.measure import throughput
    from dtem.tasks.classification import evaluate as task

    first = next(found.models[0].parameters())
    image = found.document["image"]
    batch = torch.randn(size, *image, device=first.device)
    with task.evaluating(*found.models):
        return throughput.compare({one.name: one.forward.forward for one in found.contenders}, batch, rounds)


def _tables(document: dict[str, Any], sizes: Sequence[int]) -> list[Any]:
    timed = (f"{what}, batch {size}" for size in sizes for what in ("im/s", "speed-up"))
    columns = ("method", "budget", "GFLOPs (MACs)", "off", *timed)
    rows = [
        (
            one["method"],
            one["r"],
            outcome_tables.gigas(one),
            _off(one.get("off_budget")),
            *(text for size in sizes for text in _speeds(one, str(size))),
        )
        for one in document["rows"]
    ]
    parts: list[Any] = [common.table("Cost", columns, rows, f"!: more than {TOLERANCE:.0%} off its budget")]
    parts += [f"not compared: {name}: {reason}" for name, reason in document["not_compared"].items()]
    return parts


def _speeds(one: dict[str, Any], size: str) -> tuple[str, str]:
    spread = "{median:.2f} ({low:.2f}–{high:.2f})".format(**one["speedup"][size])
    return f"{one['images_per_second_at'][size]:.1f}", spread


def _off(share: float | None) -> str:
    """How far a cost is from its budget; the unmerged model has none."""
    if share is None:
        return ""
    return f"{100 * share:+.1f} %" + (" !" if abs(share) > TOLERANCE else "")
