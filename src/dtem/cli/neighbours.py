"""`dtem eval --knn`: models that give features, judged by nearest neighbours."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from dtem.tasks.classification.sources import Source

Forward = Callable[["Tensor"], "Tensor"]


def by_neighbours(
    args: argparse.Namespace,
    forwards: Mapping[str, Forward],
    bank: "Source",
    transform: Callable[..., Any],
    progress: Callable[[int | None, int | None], Any],
) -> dict[str, Forward]:
    """The same models as classifiers, each with a bank of its own features."""
    from dtem.tasks.classification import data, nearest
    from dtem.types import DtemError

    if args.neighbours < 1:
        raise DtemError(f"--neighbours {args.neighbours} must be 1 or more")
    made: dict[str, Forward] = {}
    with progress(None, None if bank.length is None else bank.length * len(forwards)) as advance:
        for name, forward in forwards.items():

            def counted(images: "Tensor", forward: Forward = forward) -> "Tensor":
                advance(len(images))
                return forward(images)

            loader = data.Loader(bank, transform, args.batch, workers=args.workers)
            voting = nearest.Nearest(counted, loader, args.neighbours, args.device)
            voting.forward = forward
            made[name] = voting
    return made
