"""What verbs that look at images share."""

import argparse
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtem.tasks.classification.augment import Transform


def transform(host: "nn.Module", image: tuple[int, int, int]) -> "Transform":
    """From a picture to what the host takes, as it is evaluated."""
    from timm.data.config import resolve_data_config

    from dtem.tasks.classification.data import eval_transform

    return eval_transform(dict(resolve_data_config({"input_size": image}, model=host)))  # type: ignore[no-untyped-call]


def few(
    args: argparse.Namespace, host: "nn.Module", image: tuple[int, int, int], count: int, source: Any = None
) -> list["Tensor"]:
    """The images of `args.data`, or of `source`, but no more than `count`."""
    from dtem.tasks.classification import data, evaluate, sources

    source = sources.open_source(args.data) if source is None else source
    chosen = evaluate.sample(source, count)
    loader = data.Loader(chosen, transform(host, image), args.batch, workers=args.workers)
    taken = itertools.takewhile(lambda turn: turn[0] * args.batch < count, enumerate(loader.epoch(0)))
    return [batch.images.to(args.device) for _, batch in taken]


def check_counts(args: argparse.Namespace, **least: int) -> None:
    """Refuse counts below what they can be, and a device that is not there."""
    import torch

    from dtem.types import DtemError

    for option, lowest in least.items():
        value = getattr(args, option)
        if value is not None and value < lowest:
            raise DtemError(f"--{option} {value} must be {lowest} or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DtemError("--device cuda: torch sees no CUDA device here; use --device cpu")
