"""Who takes part in an evaluation: the unmerged model, and each method at each r."""

import argparse
import copy
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtem.cli import common

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtem.handle import Handle
    from dtem.types import HostSpec

UNMERGED = "unmerged"
REFERENCE = "tome"
"""What every other method is compared with."""


class Timed:
    """A forward that remembers how long it took."""

    def __init__(self, forward: "Callable[[Tensor], Tensor]") -> None:
        self.forward = forward
        self.turns: list[tuple[int, float]] = []

    def __call__(self, images: "Tensor") -> "Tensor":
        start = self._now(images)
        logits = self.forward(images)
        self.turns.append((len(images), self._now(images) - start))
        return logits

    @staticmethod
    def _now(images: "Tensor") -> float:
        if images.is_cuda:
            import torch

            torch.cuda.synchronize(images.device)
        return time.perf_counter()

    @property
    def images_per_second(self) -> float:
        """Over all turns but the first, which warms up."""
        turns = self.turns[1:] or self.turns
        return sum(count for count, _ in turns) / max(sum(seconds for _, seconds in turns), 1e-9)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One method at one r, with what it costs."""

    label: str
    r: str
    tokens: int
    macs: int
    paper: int
    forward: Timed

    @property
    def name(self) -> str:
        """Also of its file."""
        return UNMERGED if self.label == UNMERGED else re.sub(r"[^\w.@%+-]", "_", f"{self.label}-r{self.r}")

    @classmethod
    def unmerged(cls, host: "nn.Module", spec: "HostSpec") -> "Contender":
        """The host itself, never patched."""
        from dtem import adapters
        from dtem.measure import flops

        count, forward = flops.count(host, spec.image), Timed(adapters.asked(host))
        return cls(UNMERGED, "0", spec.patches + spec.prefix, count.macs, count.paper, forward)


def merged(label: str, handle: "Handle", specs: Sequence[str]) -> list[Contender]:
    """One contender per r; where nothing would be merged there is none, that is the unmerged model. Nor is there one
    for a learned r where nothing is learned: other methods may have it."""
    from dtem.tasks.classification import evaluate

    if handle.method.schedule() is None:
        specs = [spec for spec in specs if spec != "learned"]
    contenders = []
    for spec, forward in evaluate.at_rates(handle, specs).items():
        handle.r = spec
        if handle.merger.active:
            count = common.count(handle)
            contenders.append(Contender(label, spec, handle.tokens[-1], count.macs, count.paper, Timed(forward)))
    return contenders


def contestants(args: argparse.Namespace, host: "nn.Module") -> tuple[dict[str, "Handle"], dict[str, list[str]]]:
    """Patched copies of `host` by label, and the files that each was trained on. They share the host's weights.

    An adapter takes the place of its untrained method.
    """
    import dtem
    from dtem import storage
    from dtem.tasks.classification import evaluate
    from dtem.types import DtemError

    shared = {id(tensor): tensor for tensor in (*host.parameters(), *host.buffers())}
    trained: dict[str, Handle] = {}
    lists: dict[str, list[str]] = {}
    for given in args.adapter:
        label, name = split_label(given)
        path = storage.locate(name, None)
        handle = dtem.from_pretrained(path, copy.deepcopy(host, dict(shared)), r=0, shortcut=args.shortcut)
        label = label or handle.method.name
        if label in trained or label == UNMERGED:
            raise DtemError(f"--adapter {given}: {label!r} is taken; give each adapter its own label, LABEL=FILE")
        trained[label] = handle
        lists[label] = evaluate.trained_on(storage.read(path)[0])
    served = {handle.method.name for handle in trained.values()}
    handles: dict[str, Handle] = {}
    for method in dict.fromkeys(part.strip() for part in args.method.split(",")):
        if method in trained and method not in served:
            raise DtemError(f"{method!r} is a method and the label of an adapter; call the adapter something else")
        if method not in served:
            handles[method] = dtem.patch(copy.deepcopy(host, dict(shared)), method, shortcut=args.shortcut)
    return {**handles, **trained}, lists


def split_label(given: str) -> tuple[str | None, str]:
    """``label=FILE`` in its two parts; a file that is called so is just that."""
    from dtem.types import DtemError

    label, equals, name = given.partition("=")
    if not equals or Path(given).exists():
        return None, given
    if not re.fullmatch(r"[\w.+-]+", label) or not name:
        raise DtemError(f"--adapter {given}: write LABEL=FILE, with letters, digits and . _ + - in the label")
    return label, name
