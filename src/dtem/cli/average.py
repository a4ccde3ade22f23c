"""The mean of several adapters for one model: often better than each of them, at no cost. Judge it (dtem eval).

Train several times (another --seed, another --preset), then average. The adapters must have started from the keys, as
they do by default.
"""

import argparse
import json

from dtem.cli import common

NAME = "average"
HELP = "one adapter from several: the mean of their embeddings"
EXAMPLES = """\
examples:
  dtem train --model deit_tiny_patch16_224 --data photos --preset few        --out runs/a
  dtem train --model deit_tiny_patch16_224 --data photos --preset few_priced --out runs/b
  dtem average runs/a/adapter.safetensors runs/b/adapter.safetensors --out mean.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("adapters", metavar="FILE_OR_NAME", nargs="+", help="adapters: files, hub ids or shipped names")
    parser.add_argument("--out", metavar="FILE", required=True, help="the file to write")


def run(args: argparse.Namespace) -> int:
    """Average, and say what came of it."""
    from dtem.averaging import average

    header = average(args.adapters, args.out)
    files = len(json.loads(header["notes"].get("trained_on", "[]")))
    document = {
        "out": args.out,
        "adapters": args.adapters,
        "method": header["method"],
        "host": header["host"]["name"],
        "training_files": files,
    }
    named = f" for {header['host']['name']}" if header["host"]["name"] else ""
    learned = f"; {files} training files are listed in it" if files else ""
    common.show(
        args, document, f"{args.out}: the mean of {len(args.adapters)} {header['method']} adapters{named}{learned}"
    )
    return 0
