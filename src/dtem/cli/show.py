"""Draw which patches of an image were merged: patches that share a token have one colour, their mean, with a line
around them; patches that were dropped are dim and hatched.

The numbers under each picture say how the tokens that are left are shared out. A token that holds several patches
counts for each of them in equal parts. Foreground is what --mask says: patches of which at least half is not black.
Without a mask it is estimated: the patches to which the class token of the unmerged model attends more than evenly
(mean over heads and blocks). That is the model's own idea of what matters, not a segmentation.

`dtem` comes with trained embeddings for deit_tiny_patch16_224, vit_tiny_patch16_224 and mnist_vit (the package's own
digit reader, offline); for other models give yours as --adapter: untrained, dtem merges exactly as tome does.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common

if TYPE_CHECKING:
    from torch import nn

    from dtem.handle import Handle
    from dtem.tasks.classification.show import Shown

NAME = "show"
HELP = "draw which patches of an image were merged"
EXAMPLES = """\
examples:
  dtem show cat.jpg --method tome,dtem --r 16
  dtem show cat.jpg --model deit_tiny_patch16_224 --weights deit.safetensors --blocks all --out cat.svg
  dtem show cat.jpg --method tome,evit --r 13 --mask cat-mask.png --json
  dtem show seven.png --model mnist_vit --r 32
"""
MODEL = "deit_tiny_patch16_224"
BLOCKS = ("some", "all", "last")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("image", metavar="IMAGE", help="a PNG, JPEG or WebP file")
    add("--method", metavar="LIST", default="tome,dtem", help="methods, with commas; default %(default)s")
    add(
        "--r",
        metavar="R",
        default="16",
        help="tokens merged per block, in any form of `dtem flops`; default %(default)s",
    )
    add("--model", metavar="NAME", default=MODEL, help="timm name, or mnist_vit; default %(default)s")
    add(
        "--weights", metavar="FILE", help="host weights: a .safetensors or torch file; default: timm's own (downloaded)"
    )
    add_host_arguments(parser)
    add("--mask", metavar="FILE", help="foreground: an image of the same size, black where it is not")
    add("--blocks", metavar="WHICH", default="some", help="some, all, last, or numbers as 3,6,12; default %(default)s")
    add("--out", metavar="FILE", default="dtem-show.png", help="picture to write: .png or .svg; default %(default)s")


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """What else may be said of a classifier."""
    add = parser.add_argument
    add(
        "--adapter",
        metavar="[LABEL=]FILE",
        action="append",
        default=[],
        help="trained embeddings: a file, hub id or shipped name; several with a label each",
    )
    add("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")


def run(args: argparse.Namespace) -> int:
    """Merge, draw, count, write."""
    import dtem
    from dtem.tasks.classification import pictures
    from dtem.tasks.classification.show import form_of
    from dtem.types import DtemError

    form_of(args.out)
    specs, blocks = common.schedules(args.r), _blocks(args.blocks)
    if len(specs) != 1:
        raise DtemError(f"--r {args.r}: a picture is of one r; give one")
    image = pictures.open_image(args.image)
    model = host(args)
    found = handles(args, model)
    for handle in found.values():
        handle.r = specs[0]
    shown = dtem.show(found, image, mask=args.mask)
    if not isinstance(blocks, str) and max(blocks) >= shown.depth:
        raise DtemError(f"--blocks {args.blocks}: the model has blocks 1 to {shown.depth}")
    shown.save(args.out, blocks)
    document = _document(args, model, shown)
    common.show(args, document, *_tables(document, shown))
    return 0


def host(args: argparse.Namespace) -> "nn.Module":
    """The classifier that the options name; `mnist_vit` is the package's own."""
    from dtem.tasks.classification import digits
    from dtem.types import DtemError

    if args.model != digits.NAME:
        args.pretrained = args.weights is None
        return common.build(args)
    for option in ("weights", "classes", "img_size", "pool"):
        if getattr(args, option) is not None:
            raise DtemError(f"--{option.replace('_', '-')} is not for {digits.NAME}, which comes as it is")
    return digits.host()


def embeddings(model: str) -> "Path | None":
    """Trained ones that come with the package, if there are any for the model of that name."""
    from dtem import storage
    from dtem.tasks.classification import digits

    return digits.adapter() if model == digits.NAME else storage.shipped().get(model.partition(".")[0])


def handles(args: argparse.Namespace, model: "nn.Module") -> "dict[str, Handle]":
    """Patched copies of the model by method; `dtem` with the shipped embeddings where no others are given."""
    from dtem.cli.contenders import contestants

    args.shortcut = False
    if "dtem" in common.methods(args.method) and not args.adapter and (shipped := embeddings(args.model)):
        args.adapter = [str(shipped)]
    return contestants(args, model)[0]


def _blocks(text: str) -> str | list[int]:
    """As `Shown.blocks` takes it, which counts from 0."""
    from dtem.types import DtemError

    if text in BLOCKS:
        return text
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"--blocks {text} is not known; write {', '.join(BLOCKS)}, or numbers from 1 with commas")
    return [int(part) - 1 for part in parts]


def _document(args: argparse.Namespace, model: "nn.Module", shown: "Shown") -> dict[str, Any]:
    trained = {Path(name.partition("=")[2] or name).name for name in args.adapter}
    rows = []
    for name, view in shown.views.items():
        found = shown.allocation(name)
        rows.append(
            {
                "method": name,
                "r": view.r,
                "tokens": list(view.tokens),
                "groups": [view.groups(block) for block in range(shown.depth)],
                "top5": _top5(model, view.probabilities),
                "allocation": None if found is None else found.as_dict(),
            }
        )
    return {
        "image": Path(args.image).name,
        "model": args.model,
        "adapters": sorted(trained),
        "grid": list(shown.grid),
        "foreground_by": shown.foreground_by,
        "unmerged": {"top5": _top5(model, shown.unmerged)},
        "rows": rows,
        "picture": args.out,
    }


def _top5(model: "nn.Module", probabilities: Any) -> list[dict[str, Any]]:
    """The likeliest classes; none of a model without a classifier."""
    from dtem.tasks.classification.pictures import class_name

    if not getattr(model, "num_classes", 1):
        return []
    best = probabilities.topk(min(5, len(probabilities)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"class": index, "name": class_name(model, index), "probability": value} for index, value in pairs]


def _tables(document: dict[str, Any], shown: "Shown") -> list[object]:
    def said(best: list[dict[str, Any]]) -> str:
        return f"{best[0]['name']} ({100 * best[0]['probability']:.0f} %)" if best else "–"

    patches = shown.grid[0] * shown.grid[1]
    rows = [("unmerged", "0", str(patches), "", "", "", said(document["unmerged"]["top5"]))]
    for row in document["rows"]:
        part = row["allocation"]
        numbers = ["–"] * 3
        if part is not None:
            numbers = [f"{part[side]:.1f}" for side in ("foreground_tokens", "background_tokens")]
            numbers.append(f"{100 * part['share']:.0f} %")
        rows.append((row["method"], row["r"], str(row["groups"][-1]), *numbers, said(row["top5"])))
    columns = ("method", "r", "groups at the end", "on foreground", "on background", "share of foreground", "says")
    notes = []
    if shown.foreground is not None:
        notes.append(
            f"foreground: {int(shown.foreground.sum())} of {len(shown.foreground)} patches "
            f"({100 * shown.foreground.mean():.0f} %), by {shown.foreground_by}"
        )
    if "dtem" in shown.views and not document["adapters"]:
        notes.append("dtem has no trained embeddings here, so it merges exactly as tome does: give some as --adapter")
    table = common.table(f"{document['image']}, {document['model']}", columns, rows, "\n".join(notes) or None)
    table.columns[-1].justify = "left"
    return [table, f"Picture: {document['picture']}"]
