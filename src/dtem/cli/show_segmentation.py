"""Draw what a Segmenter makes of an image, and which tokens one of its components computed together.

A row for each method: the image under the classes that the model sees, then the groups of patches that were merged for
a component (attention or MLP of a block) and unmerged after it. The first row is the model without merging.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common, segmentation

if TYPE_CHECKING:
    from PIL import Image

    from dtem.tasks.segmentation.classes import Classes

NAME = "show"
HELP = "draw which patches of an image were merged"
EXAMPLES = """\
examples:
  dtem show --task segmentation street.jpg --model seg_t_mask_16 --weights seg.safetensors --classes camvid \\
      --norm imagenet --img-size 256x320 --adapter my.safetensors --ratio 0.4
  dtem show --task segmentation room.jpg --model seg_s_mask_16 --weights seg.pth --classes classes.yaml --out room.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb, for this task."""
    add = parser.add_argument
    add("image", metavar="IMAGE", help="a PNG, JPEG or WebP file")
    add("--model", metavar="NAME", required=True, help="seg_t_mask_16 … seg_l_linear_16")
    add("--weights", metavar="FILE", help="of the Segmenter")
    add("--random", action="store_true", help="random weights, to try things out")
    add("--classes", metavar="WHICH", default="150", help="camvid, voc, a YAML file of classes, or how many there are")
    add("--img-size", metavar="N", help="size of the crops that the model was trained with; default: of the preset")
    segmentation.add_norm_argument(parser)
    add("--method", metavar="LIST", default="tome", help="with commas; default %(default)s, and those of --adapter")
    add(
        "--adapter", metavar="[LABEL=]FILE", action="append", default=[], help="trained embeddings; several with labels"
    )
    add("--ratio", metavar="X", default="0.4", help="part of the tokens merged, up to 0.5; default %(default)s")
    add("--blocks", metavar="LIST", default="1,6,12", help="blocks whose groups are drawn, from 1; default %(default)s")
    add("--part", choices=("attention", "mlp"), default="attention", help="of the block; default %(default)s")
    segmentation.add_inference_arguments(parser)
    add("--out", metavar="FILE", default="dtem-show.png", help="picture to write (PNG); default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Predict, merge, draw, write."""
    import numpy as np
    import torch
    from timm.data.config import resolve_data_config

    from dtem.cli.contenders import contestants
    from dtem.files import write_file
    from dtem.tasks.classification import pictures
    from dtem.tasks.classification.evaluate import evaluating
    from dtem.tasks.segmentation.inference import predict
    from dtem.types import DtemError
    from dtem.visualise import groups
    from dtem.visualise.masks import overlay
    from dtem.visualise.sheet import sheet

    inference, specs = segmentation.inference(args), segmentation.ratios(args.ratio)
    if len(specs) != 1:
        raise DtemError(f"--ratio {args.ratio}: a picture is of one ratio above 0; give one")
    if inference.window is not None:
        raise DtemError("--window: groups are drawn for the whole image at once; leave it out")
    if Path(args.out).suffix.lower() != ".png":
        raise DtemError(f"--out {args.out}: the picture is a PNG; let it end in .png")
    classes = _classes(args.classes)
    image = pictures.open_image(args.image).convert("RGB")
    args.classes, args.shortcut = len(classes), False
    model = segmentation.build(args)
    blocks = _blocks(args.blocks, len(model.encoder.blocks))
    found, _ = contestants(args, model)
    size = inference.resized((image.height, image.width))
    image = image.resize(size[::-1])
    config = resolve_data_config(model=model)  # type: ignore[no-untyped-call]
    pixels = np.asarray(image)
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    x = (torch.from_numpy(pixels.copy()).movedim(-1, 0) / 255 - mean) / std
    (height, width), (rise, run_) = size, model.patch
    grid = (-(-height // rise), -(-width // run_))
    padded = np.pad(pixels, [(0, g * s - n) for g, s, n in zip(grid, model.patch, size, strict=True)] + [(0, 0)])

    rows: list[list[Image.Image]] = []
    captions: list[list[str]] = []
    told: list[dict[str, Any]] = []
    plain = overlay(pixels, _none(size), classes.drawn)
    with evaluating(model, *(handle.model for handle in found.values())):
        base = predict(model, x[None])[0].numpy()
        rows.append([overlay(pixels, base, classes.drawn), *[plain] * len(blocks)])
        captions.append([_legend(base, classes), *["image"] * len(blocks)])
        for label, handle in found.items():
            handle.r = specs[0]
            with handle.trace() as trace:
                said = predict(handle.model, x[None])[0].numpy()
            agrees = 100 * float((said == base).mean())
            picked = [2 * block + (args.part == "mlp") for block in blocks]
            drawn = [groups.draw_groups(padded, trace.sources[each][0], grid) for each in picked]
            rows.append(
                [overlay(pixels, said, classes.drawn), *(_fit(each, grid, model.patch, size) for each in drawn)]
            )
            counts = [len(torch.unique(trace.sources[each][0])) for each in picked]
            parts = [f"block {block + 1}, {args.part}: {count}" for block, count in zip(blocks, counts, strict=True)]
            captions.append([f"{agrees:.1f} % as unmerged", *(f"{part} groups" for part in parts)])
            told.append({"method": label, "ratio": specs[0], "agreement": agrees, "groups": counts})
    headings = ["unmerged", *(f"{one['method']}, {one['ratio']}" for one in told)]
    write_file(args.out, groups.png(sheet(rows, headings, captions)))
    seen = _seen(base, classes)
    document = {
        "image": Path(args.image).name,
        "model": args.model,
        "grid": list(grid),
        "classes": seen,
        "blocks": [block + 1 for block in blocks],
        "part": args.part,
        "rows": told,
        "picture": args.out,
    }
    table = common.table(
        f"{document['image']}, {args.model}",
        ("method", "ratio", "pixels as unmerged %", f"groups of {grid[0] * grid[1]}, by block"),
        [(one["method"], one["ratio"], f"{one['agreement']:.1f}", str(one["groups"])) for one in told],
    )
    said_to_be = ", ".join(f"{name} {part:.0f} %" for name, part in seen.items())
    common.show(args, document, table, f"Seen: {said_to_be}", f"Picture: {args.out}")
    return 0


def _classes(text: str) -> "Classes":
    from dtem.tasks.segmentation import classes
    from dtem.types import DtemError

    known = {"camvid": classes.camvid, "voc": classes.voc}
    if text in known:
        return known[text]()
    if text.isdigit() and int(text) > 0:
        return classes.Classes(tuple(f"class {index}" for index in range(int(text))), tuple(range(int(text))))
    if not Path(text).is_file():
        raise DtemError(f"--classes {text}: give camvid, voc, a number, or a YAML file (docs/segmentation.md)")
    return classes.from_yaml(Path(text))


def _blocks(text: str, depth: int) -> list[int]:
    from dtem.types import DtemError

    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= depth for part in parts):
        raise DtemError(f"--blocks {text}: give numbers from 1 to {depth}, with commas")
    return [int(part) - 1 for part in parts]


def _none(size: tuple[int, int]) -> Any:
    import numpy as np

    return np.full(size, -1)


def _fit(picture: "Image.Image", grid: tuple[int, int], patch: tuple[int, int], size: tuple[int, int]) -> "Image.Image":
    """Groups are drawn for whole patches, maybe enlarged; back to the image's own size."""
    full = picture.resize((grid[1] * patch[1], grid[0] * patch[0]))
    return full.crop((0, 0, size[1], size[0]))


def _seen(found: Any, classes: "Classes") -> dict[str, float]:
    """Percent of the pixels of each class, the largest first."""
    import numpy as np

    share = 100 * np.bincount(found.ravel(), minlength=len(classes)) / found.size
    return {classes.names[index]: float(share[index]) for index in np.argsort(-share) if share[index] > 0}


def _legend(found: Any, classes: "Classes") -> str:
    return "\n".join(f"{name} {part:.0f} %" for name, part in list(_seen(found, classes).items())[:3])
