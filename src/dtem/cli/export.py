"""Write a merging model, with its r fixed, as a file that runs without dtem: ONNX, OpenVINO or torch.export.

The batch stays free. The file holds standard operators only, and r, host, preprocessing and labels in its metadata.
After writing it is run (in onnxruntime, OpenVINO or torch) on images against PyTorch, and refused if they disagree.
With --int8 it is quantised dynamically; what that costs in accuracy is shown where --data has labels.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common, hub_models

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtem.export import Written
    from dtem.handle import Handle

NAME = "export"
HELP = "write a merging model as ONNX, OpenVINO or torch.export file, and check it"
EXAMPLES = """\
examples:
  dtem export deit_small_patch16_224 --pretrained --format onnx --r 13 --out deit_s_r13.onnx --data photos
  dtem export deit_tiny_patch16_224 --pretrained --adapter deit_tiny_patch16_224 --r 16 --format openvino --out t.xml
  dtem export deit_tiny_patch16_224 --weights w.safetensors --r 13 --format onnx --int8 --data imagenet/val --out q.onnx
  dtem export deit_tiny_patch16_224 --pretrained --r 13 --format torch --out t.pt2
"""
CHECKED = 16
"""Images that a file is checked on where --images does not say."""
JUDGED = 1000
"""The same with --int8, whose accuracy is shown. They are held in memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    common.add_model_arguments(parser, fixed=True)
    common.add_weight_arguments(parser)
    add = parser.add_argument
    add("--format", choices=("onnx", "openvino", "torch"), required=True, help="what kind of file")
    add("--out", metavar="FILE", required=True, help="its name: .onnx, .xml (a .bin comes beside it) or .pt2")
    add(
        "--data",
        metavar="SPEC",
        help="images to check the file on: a folder, timm:…, hf:…, wds:…; default: random ones",
    )
    add("--images", metavar="N", type=int, default=None, help=f"how many; default {CHECKED}, with --int8 {JUDGED}")
    add("--labels", metavar="FILE", help="names of the classes, one per line; default: ImageNet's where they fit")
    add("--int8", action="store_true", help="onnx: int8 weights, activations quantised as they come")


def run(args: argparse.Namespace) -> int:
    """Export, check, print."""
    from dtem import export
    from dtem.types import DtemError

    specs = common.schedules(args.r)
    if len(specs) != 1:
        raise DtemError(f"--r {args.r}: a file has one r; write one file for each")
    if args.images is not None and args.images < 1:
        raise DtemError(f"--images {args.images} must be 1 or more")
    if args.int8 and args.format != "onnx":
        raise DtemError(f"--int8 goes with --format onnx, not with {args.format}")
    if hub_models.named(args.model):
        raise DtemError(f"{args.model}: models of transformers are not exported; give the name of a timm model")
    host = common.build(args)
    handle = common.patch(args, host)
    handle.r = specs[0]
    random = not args.pretrained and args.weights is None
    preparation = prepared(handle)
    batches = list(images(args, handle, preparation))
    notes = {name: json.dumps(preparation[name]) for name in ("mean", "std", "interpolation", "crop_pct")}
    notes["schedule"] = str(handle.merger.schedule)
    if random:
        notes["weights"] = "random"
    written = export.write(
        handle,
        args.out,
        args.format,
        [pixels for pixels, _ in batches],
        labels=None if random and args.labels is None else labels(args, host),
        notes=notes,
        int8=args.int8,
    )
    accuracy = measured(handle, Path(args.out), batches) if args.int8 else None
    document = {
        "model": args.model,
        "random_weights": random,
        "method": handle.method.name,
        "r": specs[0],
        "plan": list(handle.plan),
        "format": args.format,
        "int8": args.int8,
        "files": [path.name for path in written.files],
        "bytes": written.bytes,
        "checked_on": "data" if args.data else "random images",
        "agreement": dataclasses.asdict(written.agreement),
        "accuracy": accuracy,
        "operators": written.operators,
        "metadata": {name: text for name, text in written.metadata.items() if name != "labels"},
        "labels": "labels" in written.metadata,
    }
    lines = _lines(args, written, accuracy)
    if random:
        lines.append("its weights are random: give --pretrained or --weights for a model that has learned something")
    common.show(args, document, *lines)
    return 0


def prepared(handle: "Handle") -> dict[str, Any]:
    """How images are made ready for this host, as timm knows it."""
    from timm.data.config import resolve_data_config

    return dict(resolve_data_config({"input_size": handle.host.image}, model=handle.model))  # type: ignore[no-untyped-call]


def images(
    args: argparse.Namespace, handle: "Handle", preparation: dict[str, Any]
) -> "Iterator[tuple[Tensor, Tensor | None]]":
    """Batches of images, ready for the model, with labels where there are any."""
    import torch

    from dtem.tasks.classification import data, evaluate, sources

    wanted = args.images
    if args.data is None:
        count = wanted or CHECKED
        generator = torch.Generator().manual_seed(0)
        yield torch.randn(count, *handle.host.image, generator=generator), None
        return
    source = sources.open_source(args.data)
    if wanted is None:
        wanted = JUDGED if args.int8 else CHECKED
    source = evaluate.sample(source, wanted)
    transform = data.eval_transform(preparation)
    classes = getattr(handle.model, "num_classes", None) if args.int8 else None
    loader = data.Loader(source, transform, CHECKED, classes=classes)
    left = wanted
    for batch in loader.epoch(0):
        yield batch.images[:left], batch.labels[:left] if source.labelled else None
        left -= len(batch.images)
        if left <= 0:
            return


def labels(args: argparse.Namespace, host: "nn.Module") -> list[str] | None:
    """Names of the classes: from --labels, or ImageNet's where timm knows that the head is one of its."""
    from dtem.types import DtemError

    if args.labels is not None:
        try:
            names = Path(args.labels).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DtemError(f"--labels {args.labels} cannot be read: {error}") from error
        if len(names) != (classes := getattr(host, "num_classes", len(names))):
            raise DtemError(f"--labels {args.labels} has {len(names)} lines, and the model {classes} classes")
        return names
    if getattr(host, "num_classes", None) != 1000:
        return None
    from timm.data.imagenet_info import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_descriptions())


def measured(handle: "Handle", path: Path, batches: "list[tuple[Tensor, Tensor | None]]") -> dict[str, Any] | None:
    """Top-1 of the int8 file and of the model itself, where the images have labels; None where they have none."""
    import torch

    from dtem.export import onnx

    run = onnx.runner(path)
    right = {"float32": 0, "int8": 0}
    total = 0
    with torch.no_grad():
        for pixels, truth in batches:
            if truth is None:
                return None
            total += len(truth)
            for name, forward in (("float32", handle.model), ("int8", run)):
                right[name] += int((forward(pixels).argmax(dim=1) == truth).sum())
    return {"images": total, **{f"top1_{name}": 100 * count / total for name, count in right.items()}}


def _lines(args: argparse.Namespace, written: "Written", accuracy: dict[str, Any] | None) -> list[str]:
    found = written.agreement
    where = f"{found.images} {'images of ' + args.data if args.data else 'random images (give --data for real ones)'}"
    lines = [
        f"{', '.join(path.name for path in written.files)}: {written.bytes / 1e6:.1f} MB, "
        f"r = {written.metadata['r']}, batch free",
        f"against PyTorch on {where}: largest difference {found.largest:.2g}, typical {found.typical:.2g}, "
        f"same class {found.same_class} of {found.images}",
    ]
    if accuracy is not None:
        lines.append(
            f"top-1 on {accuracy['images']} images: {accuracy['top1_float32']:.1f} % float32, "
            f"{accuracy['top1_int8']:.1f} % int8"
        )
    elif args.int8:
        lines.append("accuracy of int8 is not known: give labelled images with --data")
    return lines
