"""Draw which patches of an image were merged: patches that share a token have their mean colour, with a line around
them; dropped patches are dim and hatched. For a Segmenter, the predicted classes are drawn, too.

The table shows how the remaining tokens are distributed. A token that holds several patches counts for each of them in
equal parts. Foreground is given by --mask, or estimated: patches to which the class token of the unmerged model attends
more than evenly (mean over heads and blocks). That is the model's own estimate, not a segmentation.

`dtem` uses the shipped adapters of deit_tiny_patch16_224, vit_tiny_patch16_224 and digits_vit (a digit classifier that
works offline); for other models give yours as --adapter: untrained, dtem merges exactly as tome does.
"""

from argparse import Namespace

from dtem.cli import options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts
from dtem.errors import DtemError

HELP = "draw which patches of an image were merged"
EXAMPLES = """\
examples:
  dtem show cat.jpg --method tome,dtem --r 16
  dtem show cat.jpg --method tome,evit --r 13 --mask cat-mask.png --blocks all --out cat.svg
  dtem show seven.png --model digits_vit --r 16
  dtem show street.jpg --model seg_t_mask_16 --weights seg.safetensors --labels camvid --adapter my.safetensors --r 40%
"""
BLOCKS = ("some", "all", "last")


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    add = parser.group("picture").add_argument
    add("image", metavar="IMAGE", help="a PNG, JPEG or WebP file")
    add("--out", metavar="FILE", default="dtem-show.png", help="picture: .png or .svg; default %(default)s")
    add("--blocks", metavar="WHICH", default="some", help="some, all, last, or numbers as 3,6,12; default %(default)s")
    add("--mask", metavar="FILE", help="foreground: an image of the same size, black where it is not")
    add("--labels", metavar="FILE", help="names of the classes, one per line; Segmenter: camvid, voc or a YAML file")
    options.add_model_options(parser)
    options.add_method_options(parser, several=True, method="tome,dtem", r="16", several_r=False)
    add = parser.group("segmentation", advanced=True).add_argument
    add("--part", choices=("attention", "mlp"), default="attention", help="component of a block; default %(default)s")
    add("--short-side", metavar="N", type=int, default=0, help="resize the short side of the image to this first")


def run(args: Namespace) -> int:
    """Visualise, write the picture, print the report."""
    import dtem
    from dtem.models.segmenter import PRESETS
    from dtem.visualise import curves, show

    curves.form_of(args.out, ("png",) if args.model in PRESETS else show.FORMATS, "picture")
    if "," in args.r:
        raise DtemError(f"--r {args.r}: a picture shows one r; give one")
    picture = dtem.show(
        args.model,
        args.image,
        methods=args.method,
        adapters=args.adapter,
        blocks=_blocks(args.blocks),
        **options.named(args, "r", "mask", "labels", "part", "short_side", "shortcut"),
        **options.model_options(args),
    )
    picture.save(args.out)
    document = {**picture.to_dict(), "model": args.model, "picture": args.out}
    print_parts(args, document, *picture.parts(), f"Picture: {args.out}")
    return 0


def _blocks(text: str) -> str | list[int]:
    """As the functions take it, which count from 0."""
    if text in BLOCKS:
        return text
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"--blocks {text} is not known; write {', '.join(BLOCKS)}, or numbers from 1 with commas")
    return [int(part) - 1 for part in parts]
