"""Find thresholds of similarity at which images cost a budget on average.

Each image then merges as many tokens as it has that are alike, instead of the same r for all: --r adaptive. Labels are
not needed. The thresholds are printed, in the form that every --r takes, and kept with the adapter by --out.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dtem.cli import common, evaluate, pictures

if TYPE_CHECKING:
    from torch import Tensor

NAME = "calibrate"
HELP = "thresholds by which each image merges what it can, for a mean cost"
EXAMPLES = """\
examples:
  dtem calibrate --model deit_tiny_patch16_224 --data photos --gflops 0.65 --method tome
  dtem calibrate --model deit_tiny_patch16_224 --data photos --gflops 0.65 --adapter my.safetensors --out b.safetensors
  dtem eval --model deit_tiny_patch16_224 --data imagenet/val --adapter b.safetensors --r adaptive,16 --batch 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help="timm name, e.g. deit_tiny_patch16_224")
    add("--weights", metavar="FILE", help="of the host: a .safetensors or torch file; default: timm's own (downloaded)")
    add("--classes", metavar="N", type=int, help="classes of the head in --weights, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    add("--method", metavar="NAME", help="dtem (default; untrained it merges as tome does), tome, …")
    add("--adapter", metavar="FILE_OR_NAME", help="trained embeddings: a file, hub id or shipped name")
    add("--data", metavar="SPEC", required=True, help="images, labelled or not: a folder, or timm:…, hf:…, wds:…")
    add("--gflops", metavar="X", type=float, required=True, help="mean cost of an image (MACs)")
    add("--limit", metavar="N", type=int, default=256, help="images, drawn at random, the same every time; %(default)s")
    add("--batch", metavar="N", type=int, default=1, help="images that merge alike, as they will run; %(default)s")
    add("--workers", metavar="N", type=int, default=0, help="processes that decode; default: this one alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--out", metavar="FILE", help="the adapter with its thresholds (dtem and its kin: tome has nothing to keep)")


def run(args: argparse.Namespace) -> int:
    """Calibrate, keep, print."""
    import dtem
    from dtem.types import DtemError

    pictures.check_counts(args, batch=1, workers=0, limit=1)
    args.shortcut, args.pretrained = False, args.weights is None
    handle = common.patch(args, common.build(args).to(args.device))
    if args.out is not None and not handle.method.state_dict():
        raise DtemError(
            f"--out {args.out}: {handle.method.name} has no trained parts to keep; the printed thresholds are all"
        )
    batches = pictures.few(args, handle.model, handle.host.image, args.limit)
    with evaluate.progress(None, None) as advance:
        gflops = handle.calibrate(_Shown(batches, advance), f"{args.gflops!r}G")
    if args.out is not None:
        dtem.save(handle, args.out, notes=_notes(args))
    document = {
        "model": args.model,
        "method": handle.method.name,
        "images": sum(map(len, batches)),
        "batch": args.batch,
        "budget_gflops": args.gflops,
        "mean_gflops": gflops,
        "r": str(handle.merger.schedule),
        "out": args.out,
    }
    kept = "" if args.out is None else f"; kept in {args.out}: --r adaptive"
    text = f"r = {document['r']}\n{gflops:.4g} GFLOPs (MACs) on average over {document['images']} images{kept}"
    common.show(args, document, text)
    return 0


def _notes(args: argparse.Namespace) -> dict[str, str]:
    """What the adapter said of itself stays."""
    from dtem import storage

    if args.adapter is None:
        return {}
    notes: dict[str, str] = storage.read(storage.locate(args.adapter, None))[0].get("notes") or {}
    return notes


class _Shown(Sequence["Tensor"]):
    """Batches that tell how far they were read."""

    def __init__(self, batches: "Sequence[Tensor]", advance: Callable[[int], None]) -> None:
        self.batches = batches
        self.advance = advance

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> "Tensor":  # type: ignore[override]  # no slices
        return self.batches[index]

    def __iter__(self) -> "Iterator[Tensor]":
        for batch in self.batches:
            yield batch
            self.advance(len(batch))
