"""Mean IoU with and without merging, on images with masks.

Every image is decoded once and all contenders run on it; differences come with the 95 % interval of a bootstrap over
images, the same images for both sides. With --out, an evaluation that was interrupted goes on where it was.
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common, evaluate, segmentation
from dtem.cli.contenders import REFERENCE, UNMERGED, Contender, Timed, contestants

if TYPE_CHECKING:
    from torch import nn

    from dtem.handle import Handle
    from dtem.tasks.segmentation.inference import Inference
    from dtem.tasks.segmentation.outcomes import Areas
    from dtem.tasks.segmentation.pairs import Pairs

NAME = "eval"
HELP = evaluate.HELP
EXAMPLES = """\
examples:
  dtem eval --task segmentation --model seg_s_mask_16 --weights seg.pth --data ade20k:ADE#validation --short-side 512
  dtem eval --task segmentation --model seg_t_mask_16 --weights seg.safetensors --norm imagenet --img-size 256x320 \\
      --data camvid:CamVid#val --adapter my.safetensors --ratio 0.2,0.3,0.4,0.5 --out results --plot curve.svg
  dtem eval --task segmentation --model seg_s_mask_16 --weights seg.pth --data folder --window 512 --stride 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb, for this task."""
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help="seg_t_mask_16 … seg_l_linear_16")
    add("--weights", metavar="FILE", help="of the Segmenter: a published checkpoint, or what `dtem train` wrote")
    add("--random", action="store_true", help="random weights, to try things out")
    add("--classes", metavar="N", type=int, help="default: as many as the data has")
    add("--img-size", metavar="N", help="size of the crops that the model was trained with; default: of the preset")
    segmentation.add_norm_argument(parser)
    add("--data", metavar="SPEC", required=True, help=segmentation.DATA)
    add("--method", metavar="LIST", default=REFERENCE, help="with commas; default %(default)s, and those of --adapter")
    add(
        "--adapter", metavar="[LABEL=]FILE", action="append", default=[], help="trained embeddings; several with labels"
    )
    add(
        "--ratio",
        metavar="LIST",
        default="0,0.2,0.3,0.4,0.5",
        help="parts of the tokens merged before every component, 0 (always there) to 0.5; default %(default)s",
    )
    segmentation.add_inference_arguments(parser)
    add("--workers", metavar="N", type=int, default=0, help="processes that decode; default: this one alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--dtype", choices=evaluate.DTYPES, default=evaluate.DTYPES[0], help="default %(default)s; others by autocast")
    add("--limit", metavar="N", type=int, help="only N images, drawn at random, the same every time")
    add("--out", metavar="DIR", help="keep every image's outcome and record.json; the same command again goes on")
    add("--plot", metavar="FILE", help="draw mean IoU against GFLOPs: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, keep."""
    import torch

    from dtem.tasks.segmentation.pairs import open_pairs

    inference = segmentation.inference(args)
    _check(args)
    source = _limited(open_pairs(args.data), args.limit)
    args.classes, args.shortcut = args.classes or len(source.classes), False
    segmentation.check_classes(args, source.classes)
    specs = segmentation.ratios(args.ratio)
    host = segmentation.build(args).to(args.device)
    handles, _ = contestants(args, host)
    contenders = _contenders(host, handles, specs, _image_size(source, inference))
    dtype = None if args.dtype == evaluate.DTYPES[0] else getattr(torch, args.dtype)
    found = _compete(args, source, host, handles, contenders, inference, dtype)
    document = _document(args, source, contenders, found)
    common.show(args, document, *_tables(document))
    _keep(args, document)
    return 0


def _check(args: argparse.Namespace) -> None:
    import torch

    from dtem.types import DtemError
    from dtem.visualise import curves

    if args.workers < 0 or (args.limit is not None and args.limit < 1):
        raise DtemError(f"--workers {args.workers} must be 0 or more, --limit {args.limit} 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DtemError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if args.plot is not None:
        curves.form_of(args.plot)
        curves.check()


def _limited(source: "Pairs", limit: int | None) -> "Pairs":
    import torch

    from dtem.tasks.segmentation.pairs import Pairs

    if limit is None or limit >= len(source.pairs):
        return source
    drawn = torch.randperm(len(source.pairs), generator=torch.Generator().manual_seed(0))[:limit]
    return Pairs(source.spec, [source.pairs[index] for index in drawn.sort().values.tolist()], source.classes)


def _image_size(source: "Pairs", inference: "Inference") -> tuple[int, int]:
    """What goes through the model at once, by the first image: what GFLOPs are counted for."""
    from PIL import Image

    if inference.window is not None:
        return inference.window
    with Image.open(source.pairs[0][0]) as image:
        width, height = image.size
    return inference.resized((height, width))


def _contenders(
    host: "nn.Module", handles: "Mapping[str, Handle]", specs: list[str], size: tuple[int, int]
) -> list[Contender]:
    from dtem.measure import flops
    from dtem.tasks.classification.evaluate import at_rates

    def contender(label: str, spec: str, model: "nn.Module", forward: Any) -> Contender:
        count = flops.count(model, (3, *size))
        return Contender(label, spec, 0, count.macs, count.paper, Timed(forward))

    found = [contender(UNMERGED, "0", host, host)]
    for label, handle in handles.items():
        for spec, forward in at_rates(handle, specs).items():
            handle.r = spec
            found.append(contender(label, spec, handle.model, forward))
    return found


def _compete(
    args: argparse.Namespace,
    source: "Pairs",
    host: "nn.Module",
    handles: "Mapping[str, Handle]",
    contenders: list[Contender],
    inference: "Inference",
    dtype: Any,
) -> "dict[str, Areas]":
    """All of them on every image, or on those that are left."""
    from timm.data.config import resolve_data_config

    from dtem.tasks.classification.evaluate import evaluating
    from dtem.tasks.segmentation import evaluate as running
    from dtem.tasks.segmentation.views import eval_transform

    forwards = {contender.name: contender.forward for contender in contenders}
    kept: running.Kept | None = None
    left: Any = source
    if args.out is not None:
        kept = running.Kept(segmentation.folder(args.out), _about(args, host, handles, inference), list(forwards))
        rest = running.images_left(source, kept.done)
        if rest is None:
            return kept.found
        left = rest
    transform = eval_transform(resolve_data_config(model=host), source.classes)  # type: ignore[no-untyped-call]
    loader = running.open_loader(left, transform, args.workers)
    after = None if kept is None else kept.save
    models = [host, *(handle.model for handle in handles.values())]
    with evaluating(*models), evaluate.progress(None, left.length) as advance:
        found = running.compete(
            forwards, loader, args.classes, inference, args.device, dtype, progress=advance, after=after
        )
    return found if kept is None else kept.save(found)


def _about(args: argparse.Namespace, host: "nn.Module", handles: "Mapping[str, Handle]", inference: "Inference") -> str:
    """What outcomes must have in common to be one evaluation: weights, embeddings, sizes, precision."""
    import torch

    total = hashlib.sha256()
    for model in (host, *(handle.method for handle in handles.values())):
        for name, tensor in model.state_dict().items():
            total.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{args.model} {total.hexdigest()[:16]}, {inference}, {args.dtype}"


def _document(
    args: argparse.Namespace, source: "Pairs", contenders: list[Contender], found: "Mapping[str, Areas]"
) -> dict[str, Any]:
    from dtem.measure import record

    reference = {one.r: one for one in contenders if one.label == REFERENCE}
    rows = [_row(one, found, reference.get(one.r)) for one in contenders]
    return {
        "task": "segmentation",
        "model": args.model,
        "data": record.plain_command(["", args.data])[1],
        "images": len(found[UNMERGED]),
        "classes": list(source.classes.names),
        "device": args.device,
        "dtype": args.dtype,
        "conventions": common.CONVENTIONS,
        "rows": rows,
    }


def _row(one: Contender, found: "Mapping[str, Areas]", reference: Contender | None) -> dict[str, Any]:
    import math

    from dtem.tasks.segmentation.outcomes import paired

    own = found[one.name]

    def against(other: str) -> dict[str, float]:
        return dataclasses.asdict(paired(found[other], own))

    return {
        "method": one.label,
        "ratio": one.r,
        "miou": own.miou,
        "pixel_accuracy": own.accuracy,
        "class_accuracy": own.class_accuracy,
        "iou": [None if math.isnan(value) else value for value in own.iou.tolist()],
        "macs": one.macs,
        "paper": one.paper,
        "images_per_second": one.forward.images_per_second if one.forward.turns else None,
        f"against_{UNMERGED}": None if one.label == UNMERGED else against(UNMERGED),
        f"against_{REFERENCE}": None if reference is None or reference is one else against(reference.name),
    }


def _tables(document: Mapping[str, Any]) -> list[object]:
    from dtem.cli.outcome_tables import ROUGH, points

    rows = [
        (
            one["method"],
            one["ratio"],
            f"{one['miou']:.2f}",
            f"{one['pixel_accuracy']:.2f}",
            common.giga(one["macs"]),
            "" if one["images_per_second"] is None else f"{one['images_per_second']:.1f}",
            *("" if one[key] is None else points(one[key]) for key in (f"against_{UNMERGED}", f"against_{REFERENCE}")),
        )
        for one in document["rows"]
    ]
    gains = (f"points against {UNMERGED} (95 %)", f"points against {REFERENCE} (95 %)")
    columns = ("method", "ratio", "mIoU %", "pixels %", "GFLOPs (MACs)", "im/s", *gains)
    title = f"{document['model']}, {document['data']}, {document['device']}, {document['dtype']}"
    notes = f"{document['images']} images; intervals by a bootstrap over images\n{ROUGH}"
    names = [f"{one['method']} {one['ratio']}" for one in document["rows"]]
    by_class = [
        (name, *("–" if one["iou"][index] is None else f"{one['iou'][index]:.1f}" for one in document["rows"]))
        for index, name in enumerate(document["classes"])
    ]
    shown = [common.table(title, columns, rows, notes)]
    if len(by_class) <= 30:  # more are in --json
        shown.append(common.table("IoU % by class", ("class", *names), by_class))
    return shown


def _keep(args: argparse.Namespace, document: Mapping[str, Any]) -> None:
    from dtem.measure import record
    from dtem.visualise import curves

    if args.out is not None:
        kept = record.collect(NAME, document, seed=0, command=args.command)
        record.save(kept, Path(args.out, "record.json"))
    if args.plot is not None:
        base, *rows = document["rows"]
        lines: dict[str, list[curves.Point]] = {}
        for one in rows:
            lines.setdefault(one["method"], []).append(curves.Point(one["macs"] / 1e9, one["miou"], one["ratio"]))
        point = curves.Point(base["macs"] / 1e9, base["miou"], UNMERGED)
        curves.save(lines, args.plot, base=point, title=args.model, value="mean IoU (%)")
