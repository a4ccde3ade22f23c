"""What the verbs share for segmentation: the options of a Segmenter, and building it."""

import argparse
from typing import TYPE_CHECKING, Any

from dtem.cli import common

if TYPE_CHECKING:
    from dtem.hosts.segmenter import Segmenter

NORMS = {"half": ((0.5,) * 3, (0.5,) * 3), "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
"""Mean and standard deviation of the pixels that the encoder was trained with."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose a Segmenter; `dtem train` has them beside those of the other tasks."""
    add = parser.add_argument
    add("--encoder", metavar="FILE", help="segmentation: weights of the encoder alone (timm's), e.g. of DeiT-T")
    add(
        "--norm",
        choices=tuple(NORMS),
        help="segmentation: mean and deviation of pixels: half (0.5, AugReg and published Segmenters) or imagenet "
        "(DeiT); default half",
    )


def build(args: argparse.Namespace, drop_path_rate: float = 0.0, **options: Any) -> "Segmenter":
    """The Segmenter that the options describe, in eval mode."""
    from dtem.hosts import segmenter, segmenter_weights
    from dtem.types import DtemError

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
