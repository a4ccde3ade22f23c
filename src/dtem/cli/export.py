"""Write a merging model, at a fixed r, as a file that runs without dtem: ONNX, OpenVINO or torch.export.

The batch size stays free. The file has standard operators only, and r, model, preprocessing and labels as metadata. It
is run on images and refused if it disagrees with PyTorch. With --int8, ONNX is quantised dynamically and OpenVINO by
the range of activations on --data; the accuracy is measured where --data has labels.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report

HELP = "write a merging model as an ONNX, OpenVINO or torch.export file, and check it"
EXAMPLES = """\
examples:
  dtem export --model deit_small_patch16_224 --r 13 --out deit_s_r13.onnx --data photos
  dtem export --model deit_tiny_patch16_224 --adapter deit_tiny_patch16_224 --r 16 --out t.xml
  dtem export --model deit_tiny_patch16_224 --weights w.safetensors --int8 --data imagenet/val --out q.onnx
  dtem export --model deit_tiny_patch16_224 --r 13 --out t.pt2
  dtem export --model hf:facebook/deit-tiny-patch16-224 --r 13 --out t.onnx
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    options.add_model_options(parser)
    options.add_method_options(parser, several=False, method=None, r="13")
    add = parser.group("file").add_argument
    add(
        "--out",
        metavar="FILE",
        required=True,
        help=".onnx, .xml (OpenVINO; a .bin is written next to it) or .pt2 (torch)",
    )
    add("--format", choices=("onnx", "openvino", "torch"), help="default: by the ending of --out")
    add("--int8", action="store_true", help="int8 weights and activations (onnx, openvino)")
    add("--labels", metavar="FILE", help="names of the classes, one per line; default: ImageNet's where they fit")
    add = parser.group("check").add_argument
    add("--data", metavar="DATA", help="images: a folder, timm:…, hf:…, wds:…; default: random ones")
    add("--limit", metavar="N", type=int, help="number of images; default 16, with --int8 and --data 1000")


def run(args: Namespace) -> int:
    """Export and print the report."""
    import dtem
    from dtem.exporters.export import check_format

    check_format(args.out, args.format, args.int8)
    report = dtem.export(
        options.build_handle(args),
        args.out,
        **options.named(args, "format", "int8", "data", "limit", "labels"),
        notes={"weights": "random"} if args.random_weights else None,
    )
    print_report(args, report)
    return 0
