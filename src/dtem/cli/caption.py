"""Caption images at one r or several.

The model is GIT, from the Hub or a folder. Tokens are merged in its vision encoder; its decoder reads the others.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser
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
    options.add_generating_model_options(parser, default="hf:microsoft/git-base-coco", r="0,13")


def run(args: Namespace) -> int:
    """Caption and print the report."""
    from dtem.tasks.captioning.generate import caption

    handle, rates, settings = options.generating(args)
    print_report(args, caption(handle, args.images, rates, **settings))
    return 0
