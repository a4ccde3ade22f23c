"""Predict the classes of every image of a folder, of shards or of a dataset, and write them as one Parquet file.

Predictions are saved every 20 seconds in OUT.parts: the same command again resumes an interrupted run. Images that
cannot be read are rows with the reason in the column `error`, and are listed at the end. Under `accelerate launch`
every process predicts its share; on several machines --out must be on a shared disk.
"""

import os
from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report
from dtem.errors import require

HELP = "predict the classes of every image of a dataset, into a Parquet file"
EXAMPLES = """\
examples:
  dtem predict photos --r 13 --out preds.parquet --workers 4
  dtem predict photos --model deit_tiny_patch16_224 --adapter deit_tiny_patch16_224 --r 16 --out preds.parquet
  dtem predict 'wds:shards/images-{0000..0099}.tar' --model deit_small_patch16_224 --r 13 --out preds.parquet
  dtem predict photos --r 13 --engine onnx --out preds.parquet
  accelerate launch --num_processes 4 -m dtem.cli predict photos --r 13 --device cuda --dtype bfloat16 --out p.parquet
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("data").add_argument
    add("data", metavar="DATA", help="folder of images, or timm:…, hf:…, wds:…")
    add("--out", metavar="FILE", required=True, help="the Parquet file")
    add("--top", metavar="N", type=int, default=5, help="classes per image; default %(default)s")
    add("--labels", metavar="FILE", help="names of the classes, one per line")
    add("--limit", metavar="N", type=int, help="predict only the first N images")
    options.add_model_options(parser, default="deit_small_patch16_224")
    options.add_method_options(parser, several=False, method=None, r="13")
    options.add_run_options(parser)
    add = parser.group("run").add_argument
    add(
        "--engine",
        choices=("eager", "onnx", "openvino"),
        default="eager",
        help="what runs the model; default %(default)s",
    )


def run(args: Namespace) -> int:
    """Predict and print the report."""
    require("pyarrow", "predict")
    import dtem

    settings = options.named(args, "labels", "top", "batch_size", "workers", "device", "dtype", "limit", "engine")
    report = dtem.predict(options.build_handle(args), args.data, args.out, **settings)
    if os.environ.get("RANK", "0") == "0":
        print_report(args, report)
    return 0
