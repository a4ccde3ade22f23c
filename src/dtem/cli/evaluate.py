"""Accuracy with and without merging, on labelled images.

Every image is decoded once and all contenders run on it, so they are compared image by image: the difference comes
with its 95 % interval, and McNemar's exact test says how likely one like it is by chance. Images that an adapter was
trained on, by its own list, are left out for all.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dtem.cli import common, outcome_tables, pictures
from dtem.cli.contenders import REFERENCE, UNMERGED, Contender, Entry, add_listed_argument, contestants, merged, settled
from dtem.cli.neighbours import by_neighbours

if TYPE_CHECKING:
    from torch import nn

    from dtem.tasks.classification.outcomes import Outcomes

NAME = "eval"
HELP = "accuracy at each r, compared image by image"
EXAMPLES = """\
examples:
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --r 8,13,16
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --adapter my.safetensors --out results --plot curve.png
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --adapter a=one.safetensors --adapter b=two.safetensors
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --adapter rates.safetensors --r learned,16
  dtem eval --model vit_tiny_patch16_224 --data imagenet/val --knn imagenet/train    features, by nearest neighbours
  dtem eval --compare results/tome-r16.safetensors results/dtem-r16.safetensors
"""
FEW = 128
"""Images on which a method whose cost differs from image to image finds the r that meets a budget on average."""
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add_shared_arguments(parser)
    add = parser.add_argument
    add("--method", metavar="LIST", default=REFERENCE, help="with commas; default %(default)s, and those of --adapter")
    add(
        "--r",
        metavar="LIST",
        default="8,13,16",
        help="tokens merged per block, as in `dtem flops`; default %(default)s",
    )
    add("--knn", metavar="SPEC", help="judge features, by the nearest of these labelled images; the head is left off")
    add("--neighbours", metavar="N", type=int, default=10, help="how many with --knn; default %(default)s")
    add("--compare", metavar="FILE", nargs=2, help="compare two files of --out (second minus first); nothing is run")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every verb that evaluates: the model, the images, and what to keep."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="timm name, e.g. deit_tiny_patch16_224")
    add("--weights", metavar="FILE", help="of the host: a .safetensors or torch file; default: timm's own (downloaded)")
    add("--classes", metavar="N", type=int, help="classes of the head in --weights, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    add("--shortcut", action="store_true", help="last block: compute the class token only (exact)")
    add("--data", metavar="SPEC", help="folder with one folder per class, in the model's order, or timm:…, hf:…, wds:…")
    add(
        "--adapter",
        metavar="[LABEL=]FILE",
        action="append",
        default=[],
        help="trained embeddings: a file, hub id or shipped name; several with a label each",
    )
    add("--batch", metavar="N", type=int, default=64, help="images per forward; default %(default)s")
    add("--workers", metavar="N", type=int, default=0, help="processes that decode; default: this one alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s; the others by autocast")
    add_listed_argument(parser)
    add(
        "--limit",
        metavar="N",
        type=int,
        help="only N images, drawn at random, the same every time (of a stream the first)",
    )
    add("--out", metavar="DIR", help="keep every image's outcome, one file per method and r, and record.json")
    add("--plot", metavar="FILE", help="draw accuracy against GFLOPs: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, keep."""
    if args.compare is not None:
        return _compare(args)
    found = measure(args)
    common.show(args, found.document, *outcome_tables.draw(found.document))
    keep(args, found.document, found.outcomes)  # last: a file that cannot be written does not cost the numbers
    return 0


class Measured(NamedTuple):
    """What an evaluation found, and who took part."""

    document: dict[str, Any]
    outcomes: dict[str, "Outcomes"]
    contenders: list[Contender]
    models: list["nn.Module"]


def measure(args: argparse.Namespace) -> Measured:
    """Run every contender that the options name on every image."""
    from dtem.types import DtemError

    _check(args)
    specs = common.schedules(args.r)
    args.pretrained = args.weights is None
    if getattr(args, "knn", None) is not None:
        args.classes = 0
    host = common.build(args).to(args.device)
    handles, lists = contestants(args, host)
    if "learned" in specs and all(handle.method.schedule() is None for handle in handles.values()):
        raise DtemError(f"--r learned: no rates were learned by {', '.join(handles)}; give an --adapter that has some")
    if "adaptive" in specs and all(handle.merger.adaptive is None for handle in handles.values()):
        raise DtemError(
            f"--r adaptive: nothing is calibrated in {', '.join(handles)}; give an --adapter that dtem calibrate wrote"
        )
    return contest(args, host, [Entry(label, handle, specs) for label, handle in handles.items()], lists)


def contest(
    args: argparse.Namespace, host: "nn.Module", entries: Sequence[Entry], lists: Mapping[str, Sequence[str]]
) -> Measured:
    """Run the host and every entry on every image but those of `lists`, which some of them were trained on."""
    import torch

    from dtem import adapters
    from dtem.measure import record
    from dtem.tasks.classification import data, evaluate, sources
    from dtem.types import DtemError

    source = sources.open_source(args.data)
    if not source.labelled:
        raise DtemError(
            f"--data {args.data} has no labels, so there is no accuracy to speak of: sort the images into one folder "
            "per class, in the order of the model's classes"
        )
    source, left_out = sources.without(source, {name for names in lists.values() for name in names})
    if args.limit is not None:
        source = evaluate.sample(source, args.limit)
    spec = adapters.find(host).describe(host)
    transform = pictures.transform(host, spec.image)
    models = [host, *(entry.handle.model for entry in entries)]
    varying = any(entry.handle.method.varies for entry in entries)
    looked_at = pictures.few(args, host, spec.image, FEW, source) if varying else None
    with evaluate.evaluating(*models):
        contenders = [Contender.unmerged(host, spec), *(c for e in entries for c in merged(*e, looked_at))]
    if args.plot and len(contenders) == 1:
        raise DtemError(f"--plot: there is nothing to draw, --r {args.r} merges nothing")
    loader = data.Loader(
        source,
        transform,
        args.batch,
        workers=args.workers,
        classes=getattr(host, "num_classes", None) or None,
    )
    dtype = None if args.dtype == DTYPES[0] else getattr(torch, args.dtype)
    forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {each.name: each.forward for each in contenders}
    if knn := getattr(args, "knn", None):
        with evaluate.evaluating(*models):
            forwards = by_neighbours(args, forwards, sources.open_source(knn), transform, progress)
    with evaluate.evaluating(*models), progress(args.limit, source.length) as advance:
        outcomes = evaluate.compete(forwards, loader, args.device, dtype, advance, args.limit)
    contenders = [settled(contender) for contender in contenders]
    document = {
        "model": args.model,
        "image": list(spec.image),
        "data": record.plain_command(["", args.data])[1],
        "images": len(outcomes[UNMERGED]),
        "left_out": {"images": left_out, "listed": {label: len(names) for label, names in lists.items() if names}},
        "unreadable": dict(loader.skipped),
        "device": args.device,
        "dtype": args.dtype,
        "batch": args.batch,
        "conventions": common.CONVENTIONS,
        "rows": [row(contender, outcomes) for contender in contenders],
        f"against_{REFERENCE}": against(contenders, outcomes),
    }
    return Measured(document, outcomes, contenders, models)


def row(contender: Contender, outcomes: Mapping[str, "Outcomes"]) -> dict[str, Any]:
    """What is known of one contender."""
    from dtem.tasks.classification.outcomes import paired

    own, base = outcomes[contender.name], outcomes[UNMERGED]
    return {
        "method": contender.label,
        "r": contender.r,
        "top1": own.top1,
        "top5": own.top5,
        "cross_entropy": own.mean_loss,
        "macs": contender.macs,
        "paper": contender.paper,
        "macs_quartiles": contender.spread,
        "images_per_second": contender.forward.images_per_second,
        "tokens": contender.tokens,
        f"against_{UNMERGED}": None if own is base else dataclasses.asdict(paired(base, own)),
    }


def against(contenders: Sequence[Contender], outcomes: Mapping[str, "Outcomes"]) -> list[dict[str, Any]]:
    """Every other method against the reference, where both ran at the same r."""
    from dtem.tasks.classification.outcomes import paired

    references = {contender.r: contender for contender in contenders if contender.label == REFERENCE}
    return [
        {
            "method": own.label,
            "r": own.r,
            **dataclasses.asdict(paired(outcomes[references[own.r].name], outcomes[own.name])),
        }
        for own in contenders
        if own.label != REFERENCE and own.r in references
    ]


def _compare(args: argparse.Namespace) -> int:
    from dtem.tasks.classification.outcomes import Outcomes, paired

    first, second = (Outcomes.load(path) for path in args.compare)
    names = [Path(path).stem for path in args.compare]
    pair = dataclasses.asdict(paired(first, second))
    top1 = {"a": first.top1, "b": second.top1}
    document = {"a": names[0], "b": names[1], "top1_alone": top1, **pair}
    common.show(args, document, outcome_tables.pairs(f"{names[1]} against {names[0]}", [(names[1], pair)]))
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong is said before hours of work."""
    from dtem.types import DtemError
    from dtem.visualise import curves

    for option in ("model", "data"):
        if getattr(args, option) is None:
            raise DtemError(f"--{option} is missing (only --compare goes without)")
    pictures.check_counts(args, batch=1, workers=0, limit=2)
    if args.classes is not None and args.weights is None:
        raise DtemError(f"--classes {args.classes} goes with --weights: timm's own weights have a head of their own")
    if args.plot is not None:
        curves.form_of(args.plot)
        curves.check()
    if args.out is not None:
        try:
            Path(args.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DtemError(f"--out {args.out} cannot be made a folder: {error.strerror}") from error


def keep(args: argparse.Namespace, document: Mapping[str, Any], outcomes: Mapping[str, "Outcomes"]) -> None:
    """Write what --out and --plot ask for."""
    from dtem.measure import record
    from dtem.visualise import curves

    if args.out is not None:
        for name, own in outcomes.items():
            own.save(Path(args.out, f"{name}.safetensors"))
        hashed = record.data_hash(args.data) if Path(args.data).is_dir() else None
        kept = record.collect(
            NAME if "budgets" not in document else "compare", document, seed=0, data=hashed, command=args.command
        )
        record.save(kept, Path(args.out, "record.json"))
    if args.plot is not None:
        base, *rows = document["rows"]
        lines: dict[str, list[curves.Point]] = {}
        for one in rows:
            lines.setdefault(one["method"], []).append(_point(one, f"r={one['r']}"))
        curves.save(lines, args.plot, base=_point(base, UNMERGED), title=args.model)


def _point(one: Mapping[str, Any], label: str) -> Any:
    from dtem.visualise import curves

    return curves.Point(one["macs"] / 1e9, one["top1"], label)


@contextlib.contextmanager
def progress(limit: int | None, length: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr: at once on a terminal, elsewhere a line now and then once it takes more than 2 seconds."""
    from tqdm import tqdm

    total = min((count for count in (limit, length) if count is not None), default=None)
    often, delay = (0.1, 0.0) if sys.stderr.isatty() else (10.0, 2.0)
    with tqdm(total=total, unit="img", file=sys.stderr, leave=False, mininterval=often, delay=delay) as bar:
        yield bar.update
