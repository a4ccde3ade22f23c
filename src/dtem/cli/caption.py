"""Caption images at one r or several.

The model is GIT, from the Hub or a folder. Tokens are merged in its vision encoder; its decoder reads the others.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser, comma_list
from dtem.cli.printing import print_report

HELP = "caption images, with and without merging"
EXAMPLES = """\
examples:
  dtem caption photo.jpg --model hf:microsoft/git-base-coco --r 0,13
  dtem caption a.jpg b.jpg --model runs/captioner --adapter my.safetensors --r 13 --num-beams 1 --json
"""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("captions").add_argument
    add("images", metavar="IMAGE", nargs="+", help="PNG, JPEG or WebP files")
    options.add_generation_options(add)
    options.add_model_options(parser, default="hf:microsoft/git-base-coco")
    options.add_method_options(parser, several=False, method=None, r="0,13", several_r=True)
    parser.group("run").add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")


def run(args: Namespace) -> int:
    """Caption and print the report."""
    from dtem.data.images import open_image
    from dtem.tasks.captioning.generate import caption

    for image in args.images:
        open_image(image)  # a file that cannot be read is refused before the model is downloaded
    handle = options.build_handle(args, several_r=True)
    settings = options.named(args, "num_beams", "max_new_tokens", "proportional_decoder", "device")
    print_report(args, caption(handle, args.images, comma_list(args.r), **settings))
    return 0
