"""Captions of images, at one r or several.

The model is GIT, from the Hub or a folder. Tokens merge in its vision encoder; its decoder reads what is left.
"""

import argparse
from typing import Any

from dtem.cli import captioning, common
from dtem.cli.pictures import check_counts

NAME = "caption"
HELP = "say what is on images, merging tokens on the way"
EXAMPLES = """\
examples:
  dtem caption photo.jpg --model microsoft/git-base-coco --r 0,13
  dtem caption a.jpg b.jpg --model runs/captioner --adapter my.safetensors --r 13 --beams 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("images", metavar="IMAGE", nargs="+", help="files")
    add("--model", metavar="NAME", required=True, help=captioning.MODEL)
    add("--weights", metavar="FILE", help=captioning.WEIGHTS)
    add("--method", metavar="NAME", help="default dtem (untrained it merges as tome does)")
    add("--adapter", metavar="FILE_OR_NAME", help="trained embeddings: a file or hub id")
    add("--r", metavar="LIST", default="0,13", help="tokens merged per block, several with commas; default %(default)s")
    captioning.add_once_argument(parser)
    captioning.add_style_arguments(parser)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Caption, print."""
    from timm.data.config import resolve_data_config

    from dtem.tasks.captioning.evaluate import at_rates, write
    from dtem.tasks.classification.data import eval_transform
    from dtem.tasks.classification.pictures import open_image

    check_counts(args)
    style, rates = captioning.style(args), captioning.rates(args)
    pictures = [open_image(path) for path in args.images]
    args.shortcut = False
    model: Any = captioning.build(args)
    model.to(args.device)
    captioning.check_longest(model, style)
    handle = common.patch(args, model)
    captioning.count_as_asked(args, handle)
    transform = eval_transform(resolve_data_config(model=model))  # type: ignore[no-untyped-call]
    ready = at_rates(handle, rates)
    rows = []
    for path, picture in zip(args.images, pictures, strict=True):
        for rate in rates:
            model = ready[rate]()
            caption = write(model, transform(picture)[None].to(args.device), style)[0]
            rows.append({"image": path, "r": rate, "tokens": handle.tokens[-1], "caption": caption})
    table = common.table(
        args.model,
        ("image", "r", "tokens", "caption"),
        [(row["image"], row["r"], str(row["tokens"]), row["caption"]) for row in rows],
    )
    common.show(args, rows, table)
    return 0
