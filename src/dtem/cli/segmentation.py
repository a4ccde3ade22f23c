"""What the verbs share for segmentation: the options of a Segmenter, and building it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common

if TYPE_CHECKING:
    from torch import nn

    from dtem.hosts.segmenter import Segmenter
    from dtem.tasks.segmentation.classes import Classes
    from dtem.tasks.segmentation.inference import Inference

NORMS = {"half": ((0.5,) * 3, (0.5,) * 3), "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
"""Mean and standard deviation of the pixels that the encoder was trained with."""


DATA = (
    "camvid:DIR#SPLIT, ade20k:DIR#SPLIT, voc:DIR#SPLIT, or a folder with images/, masks/ and classes.yaml; "
    "?part=0:300 behind it takes some of the pairs"
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a Segmenter beside those that other models have too."""
    parser.add_argument("--encoder", metavar="FILE", help="segmentation: weights of the encoder alone (timm's)")
    add_norm_argument(parser)


def add_norm_argument(parser: argparse.ArgumentParser) -> None:
    """What the model takes pixels to be."""
    text = "segmentation: mean and deviation of pixels: half (0.5; AugReg, published Segmenters; default) or imagenet"
    parser.add_argument("--norm", choices=tuple(NORMS), help=f"{text} (DeiT)")


def add_inference_arguments(parser: argparse.ArgumentParser) -> None:
    """How images of any size go through the model."""
    add = parser.add_argument
    add("--short-side", metavar="N", type=int, default=0, help="resize to this short side first (ADE20K: 512)")
    add("--window", metavar="N", help="slide a window over the image, 512 or 256x320; default: whole image at once")
    add("--stride", metavar="N", help="of the window; default: the window, so that neighbours touch")


def inference(args: argparse.Namespace) -> "Inference":
    """What those options ask for."""
    from dtem.tasks.segmentation.inference import Inference

    window, stride = (
        None if (text := getattr(args, name)) is None else common.image_size(text, f"--{name}")
        for name in ("window", "stride")
    )
    return Inference(args.short_side, window, stride)


def ratios(text: str) -> list[str]:
    """``0,0.2,0.5`` as schedules, each once; 0 is the unmerged model, which is there anyway."""
    from dtem.types import DtemError

    found = []
    for part in text.split(","):
        try:
            ratio = float(part)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio <= 0.5:
            raise DtemError(f"--ratio {part.strip()} is not a part of the tokens: give numbers from 0 to 0.5")
        if ratio:
            found.append(f"{100 * ratio:g}%")
    return list(dict.fromkeys(found))


def check_classes(args: argparse.Namespace, classes: "Classes") -> None:
    """The model and the data must mean the same by a number."""
    from dtem.types import DtemError

    if args.classes != len(classes):
        raise DtemError(f"--classes {args.classes}, and {args.data} has {len(classes)}: leave --classes out")


def folder(path: str) -> Path:
    """--out, made if it is not there."""
    from dtem.types import DtemError

    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"--out {path} cannot be made a folder: {error.strerror}") from error
    return Path(path)


def build_any(args: argparse.Namespace) -> "nn.Module":
    """For verbs that count and time, where weights do not matter: a Segmenter with random ones, or any other model."""
    from dtem.hosts.segmenter import PRESETS

    if args.model not in PRESETS:
        return common.build(args)
    if getattr(args, "pretrained", False):
        from dtem.types import DtemError

        raise DtemError(f"{args.model}: a Segmenter has no weights to download; leave --pretrained out")
    return build(argparse.Namespace(**{"classes": None, "norm": None, "random": True, **vars(args)}))


def build(args: argparse.Namespace, drop_path_rate: float = 0.0, **options: Any) -> "Segmenter":
    """The Segmenter that the options describe, in eval mode."""
    from dtem.hosts import segmenter, segmenter_weights
    from dtem.types import DtemError

    common.check_method(args, dense=True)
    if getattr(args, "pool", None) is not None:
        raise DtemError(f"--pool {args.pool} goes with classification: a Segmenter reads every patch")
    weights, encoder = getattr(args, "weights", None), getattr(args, "encoder", None)
    if weights is not None and encoder is not None:
        raise DtemError("--weights holds the encoder too; leave --encoder out")
    size = None if args.img_size is None else common.image_size(args.img_size)
    mean, std = NORMS[args.norm or "half"]
    model = segmenter.create(args.model, args.classes or 150, image=size, drop_path=drop_path_rate, mean=mean, std=std)
    if weights is not None:
        segmenter_weights.load_weights(model, weights)
    elif encoder is not None:
        segmenter_weights.load_encoder(model, encoder)
    elif not getattr(args, "random", False):
        raise DtemError("which weights? Give --weights FILE (a Segmenter), --encoder FILE (timm's ViT), or --random")
    return model.eval()
