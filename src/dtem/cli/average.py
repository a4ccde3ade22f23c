"""Average several adapters for one model: often better than each of them, at no cost. Check it with dtem eval.

Train several times (another --seed, another --preset), then average. The adapters must have been initialised from
the attention keys, as they are by default.
"""

import argparse
import json

from dtem.cli.options import named
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts

HELP = "one adapter from several: the mean of their embeddings"
EXAMPLES = """\
examples:
  dtem train --model deit_tiny_patch16_224 --data photos --preset few        --out runs/a
  dtem train --model deit_tiny_patch16_224 --data photos --preset few_fisher --out runs/b
  dtem average runs/a/adapter.safetensors runs/b/adapter.safetensors --out mean.safetensors
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    parser.add_argument(
        "adapters", metavar="ADAPTER", nargs="+", help="a file, folder, Hub id or shipped name; two or more"
    )
    parser.group("options").add_argument("--out", metavar="FILE", required=True, help="the file to write")


def run(args: argparse.Namespace) -> int:
    """Average and print a summary."""
    from dtem.adapters.averaging import average_adapters

    header = average_adapters(args.adapters, args.out)
    method, host = header["method"], header["host"]["name"]
    files = len(json.loads(header["notes"].get("trained_on", "[]")))
    summary = f"{args.out}: the mean of {len(args.adapters)} {method} adapters"
    summary += f" for {host}" if host else ""
    summary += f"; {files} training files are listed in it" if files else ""
    document = {**named(args, "out", "adapters"), "method": method, "host": host, "training_files": files}
    print_parts(args, document, summary)
    return 0
