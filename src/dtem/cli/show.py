"""Draw which patches of an image were merged: patches that share a token have their mean colour, with a line around
them; dropped patches are dim and hatched. For a Segmenter, the predicted classes are drawn, too.

The table shows how the remaining tokens are distributed. A token that holds several patches counts for each of them in
equal parts. Foreground is given by --mask, or estimated: patches to which the class token of the unmerged model attends
more than evenly (mean over heads and blocks). That is the model's own estimate, not a segmentation.

`dtem` uses the shipped adapters of deit_tiny_patch16_224, vit_tiny_patch16_224 and mnist_vit (a digit classifier that
works offline); for other models give yours as --adapter: untrained, dtem merges exactly as tome does.
"""

from argparse import Namespace
from pathlib import Path

from dtem.cli import options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts
from dtem.errors import DtemError

HELP = "draw which patches of an image were merged"
EXAMPLES = """\
examples:
  dtem show cat.jpg --method tome,dtem --r 16
  dtem show cat.jpg --method tome,evit --r 13 --mask cat-mask.png --blocks all --out cat.svg
  dtem show seven.png --model mnist_vit --r 32
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
    from dtem import schedule
    from dtem.adapters import storage
    from dtem.data.images import open_image
    from dtem.evaluation.variants import check_methods, patched_variants, split_label
    from dtem.models.segmenter import PRESETS
    from dtem.visualise import curves, segmentation, show

    dense = args.model in PRESETS
    curves.form_of(args.out, ("png",) if dense else show.FORMATS, "picture")
    if "," in args.r:
        raise DtemError(f"--r {args.r}: a picture shows one r; give one")
    schedule.parse(args.r)
    blocks, methods = _blocks(args.blocks), check_methods(args.method, dense)
    open_image(args.image)  # a file that cannot be read is refused before weights are downloaded
    settings = options.model_options(args)
    classes = segmentation.read_classes(args.labels) if dense and args.labels else None
    if classes is not None:
        settings["num_classes"] = settings["num_classes"] or len(classes)
    model = dtem.create_model(args.model, **settings)
    adapters = args.adapter
    if "dtem" in methods and not adapters and (shipped := storage.shipped_for(args.model)):
        adapters = [str(shipped)]
    handles, _ = patched_variants(model, methods, adapters, shortcut=args.shortcut)
    for handle in handles.values():
        handle.r = args.r
        if not isinstance(blocks, str) and max(blocks) >= handle.host.depth:
            raise DtemError(f"--blocks {args.blocks}: the model has blocks 1 to {handle.host.depth}")
    notes = [f"Picture: {args.out}"]
    report: show.Visualisation | segmentation.SegmentationVisualisation
    if dense:
        report = segmentation.show_segmentation(
            handles, args.image, classes=classes, blocks=blocks, part=args.part, short_side=args.short_side
        )
        report.save(args.out)
    else:
        report = dtem.show(handles, args.image, mask=args.mask, labels=args.labels)
        assert isinstance(report, show.Visualisation)
        report.save(args.out, blocks)
    if "dtem" in handles and not adapters:
        notes.insert(0, "dtem is untrained here, so it merges exactly as tome does: give a trained --adapter")
    names = sorted(Path(split_label(adapter)[1]).name for adapter in adapters)
    document = {**report.to_dict(), "model": args.model, "adapters": names, "picture": args.out}
    print_parts(args, document, *report.parts(), *notes)
    return 0


def _blocks(text: str) -> str | list[int]:
    """As the functions take it, which count from 0."""
    if text in BLOCKS:
        return text
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"--blocks {text} is not known; write {', '.join(BLOCKS)}, or numbers from 1 with commas")
    return [int(part) - 1 for part in parts]
