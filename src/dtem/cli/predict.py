"""The classes of every image in a folder, in shards or in a dataset, as one Parquet file.

Decoding runs ahead in --workers processes. What is done is kept every few seconds in OUT.parts: the same command again
goes on where it was stopped. Images that cannot be read are rows with the reason in `error`, and are listed at the end.
Started with `accelerate launch`, every process takes its share; on several machines --out is on a shared disk.
"""

import argparse
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common
from dtem.cli import export as exporting
from dtem.cli.evaluate import DTYPES, progress
from dtem.cli.pictures import check_counts

if TYPE_CHECKING:
    from dtem.tasks.classification.sources import Source

NAME = "predict"
HELP = "classes of every image in a folder or in shards, as a Parquet file"
EXAMPLES = """\
examples:
  dtem predict photos --r 13 --out preds.parquet --workers 4
  dtem predict photos --model deit_tiny_patch16_224 --adapter deit_tiny_patch16_224 --r 16 --out preds.parquet
  dtem predict 'wds:shards/images-{0000..0099}.tar' --model deit_small_patch16_224 --r 13 --out preds.parquet
  accelerate launch --num_processes 4 -m dtem.cli predict photos --model deit_small_patch16_224 --r 13 \\
      --device cuda --dtype bfloat16 --out preds.parquet
"""
SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("data", metavar="DIR", help="folder of images (class folders or not), or timm:…, hf:…, wds:…")
    add("--model", metavar="NAME", default="deit_small_patch16_224", help="timm name; default %(default)s")
    add("--out", metavar="FILE", required=True, help="the Parquet file")
    add("--weights", metavar="FILE", help="of the host: a .safetensors or torch file; default: timm's own (downloaded)")
    add("--classes", metavar="N", type=int, help="classes of the head in --weights, where not the model's own")
    add("--labels", metavar="FILE", help="names of the classes, one per line; default: ImageNet's where they fit")
    add("--method", metavar="NAME", help="default dtem (untrained it merges as tome does)")
    add("--adapter", metavar="FILE_OR_NAME", help="trained embeddings: a file, hub id or shipped name")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    add("--shortcut", action="store_true", help="last block: compute the class token only (exact)")
    add("--r", metavar="R", default="13", help="tokens merged per block, as in `dtem flops`; default %(default)s")
    add("--top", metavar="N", type=int, default=5, help="likeliest classes that are kept; default %(default)s")
    add("--batch", metavar="N", type=int, default=64, help="images per forward; default %(default)s")
    add("--workers", metavar="N", type=int, default=0, help="processes that decode ahead; default: this one alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s; the others by autocast")


def run(args: argparse.Namespace) -> int:
    """Predict, keep, print."""
    import torch

    from dtem.tasks.classification import data, sources
    from dtem.tasks.classification.predict import Parts, predict
    from dtem.training.processes import Processes
    from dtem.types import DtemError

    check_counts(args, batch=1, workers=0, top=1)
    specs = common.schedules(args.r)
    if len(specs) != 1:
        raise DtemError(f"--r {args.r}: give one r")
    source = sources.open_source(args.data)
    processes = Processes(cpu=args.device == "cpu")
    parts = Parts(Path(args.out), identity(args, source), processes.rank)
    processes.wait()  # all have read what is done before any adds to it
    before = len(parts.done)
    if not parts.finished:
        args.pretrained = args.weights is None
        host = common.build(args)
        if not getattr(host, "num_classes", 1):
            raise DtemError(f"{args.model} has no classifier, so there are no classes to predict: give --classes N")
        names = exporting.labels(args, host)
        handle = common.patch(args, host)
        handle.r = specs[0]
        transform = data.eval_transform(exporting.prepared(handle))
        device = processes.device if args.device == "cuda" else args.device
        left = None if source.length is None else (source.length - before) // processes.world
        with progress(None, left) as advance:
            predict(
                handle.model.to(device),
                source,
                transform,
                parts,
                batch=args.batch,
                workers=args.workers,
                rank=processes.rank,
                world=processes.world,
                top=args.top,
                labels=names,
                device=device,
                dtype=None if args.dtype == DTYPES[0] else getattr(torch, args.dtype),
                progress=advance,
            )
    processes.wait()
    if processes.rank != 0:
        return 0
    images = parts.join()
    unreadable = parts.unreadable()
    document = {
        "model": args.model,
        "r": specs[0],
        "file": Path(args.out).name,
        "images": images,
        "resumed_after": images if parts.finished else before,
        "unreadable": unreadable,
    }
    common.show(args, document, *_lines(document, unreadable))
    return 0


def identity(args: argparse.Namespace, source: "Source") -> dict[str, Any]:
    """What makes a run the same run: the images, the model and its settings. No folder is named."""
    from dtem.measure import record

    held = {
        name: getattr(args, name) for name in ("model", "method", "r", "img_size", "pool", "classes", "dtype", "top")
    }
    for name in ("weights", "adapter", "labels"):
        given = getattr(args, name)
        held[name] = record.data_hash(given) if given is not None and os.path.isfile(given) else given
    held["data"] = record.plain_command(["", args.data])[1]
    held["images"] = _fingerprint(source)
    return held


def _fingerprint(source: "Source") -> str:
    """Of the images: where they are, their names, and of files their sizes and times."""
    files = source.files
    where = sorted({os.path.realpath(folder) for folder in {os.path.dirname(file) for file in files}})
    return hashlib.sha256(
        repr((where, list(source.names or ()), list(map(_stamp, files)))).encode(errors="surrogatepass")
    ).hexdigest()


def _stamp(file: str) -> tuple[str, int, int]:
    """Name, size and time; a file that is not there will be a row with its error."""
    try:
        found = os.stat(file)
    except OSError:
        return os.path.basename(file), -1, -1
    return os.path.basename(file), found.st_size, found.st_mtime_ns


def _lines(document: dict[str, Any], unreadable: dict[str, str]) -> list[str]:
    resumed = document["resumed_after"]
    lines = [
        f"{document['file']}: {document['images']} images"
        + (f", {resumed} of them were done before" if resumed else "")
        + (f", {len(unreadable)} could not be read:" if unreadable else "")
    ]
    lines += [f"  {name}: {reason}" for name, reason in list(unreadable.items())[:SHOWN]]
    if len(unreadable) > SHOWN:
        lines.append(f"  and {len(unreadable) - SHOWN} more: the rows of the file whose error is not null")
    return lines
