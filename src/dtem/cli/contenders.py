"""Who takes part in an evaluation: the unmerged model, and each method at each r."""

import argparse
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dtem.cli import common

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtem.handle import Handle
    from dtem.schedule import Schedule
    from dtem.types import HostSpec

UNMERGED = "unmerged"
REFERENCE = "tome"
"""What every other method is compared with."""


class Timed:
    """A forward that remembers how long it took and, if asked to, how many tokens each image had after every block."""

    def __init__(self, forward: "Callable[[Tensor], Tensor]", watched: bool = False) -> None:
        self.forward = forward
        self.watched = watched
        self.turns: list[tuple[int, float]] = []
        self.tokens: list[Tensor] = []

    def __call__(self, images: "Tensor") -> "Tensor":
        start = self._now(images)
        logits = self._watch(images) if self.watched else self.forward(images)
        self.turns.append((len(images), self._now(images) - start))
        return logits

    def _watch(self, images: "Tensor") -> "Tensor":
        from dtem import adapters
        from dtem.measure import lengths

        with adapters.tracing() as trace:
            logits = self.forward(images)
        self.tokens.append(lengths.counted(trace))
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


class Entry(NamedTuple):
    """A patched model under its label, and the schedules that it runs at."""

    label: str
    handle: "Handle"
    specs: Sequence[str]


class Prices(NamedTuple):
    """What tokens cost (`measure.lengths`), in both conventions."""

    host: "HostSpec"
    macs: "Tensor"
    paper: "Tensor"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One method at one r, with what it costs."""

    label: str
    r: str
    tokens: float
    macs: int
    paper: int
    forward: Timed
    prices: Prices | None = None
    """Where every image has its own cost: to count by, once the images have been seen."""
    spread: tuple[int, int] | None = None
    """There, the quartiles of MACs over images."""

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


def settled(contender: Contender) -> Contender:
    """Costs over the images that were seen, where each has its own."""
    from dtem.measure import lengths

    prices = contender.prices
    if prices is None:
        return contender
    import torch

    tokens = torch.cat(contender.forward.tokens)
    macs, paper = (lengths.macs_at(each, tokens, prices.host) for each in (prices.macs, prices.paper))
    low, high = macs.quantile(macs.new_tensor([0.25, 0.75])).tolist()
    return dataclasses.replace(
        contender,
        tokens=round(tokens[:, -1].double().mean().item(), 1),
        macs=round(macs.mean().item()),
        paper=round(paper.mean().item()),
        spread=(round(low), round(high)),
    )


def prices_of(label: str, handle: "Handle") -> Prices:
    """What tokens cost this model. Its r stays what it is."""
    from dtem.measure import flops, lengths
    from dtem.types import DtemError

    if handle.merger.shortcut:
        raise DtemError(f"{label} is counted image by image, which goes without the shortcut; leave --shortcut out")
    before = handle.merger.schedule, handle.merger.asked

    @functools.cache
    def count(plan: tuple[int, ...]) -> "flops.Count":
        handle.r = list(plan)
        return common.count(handle)

    try:
        macs = lengths.prices_of(lambda plan: count(plan).macs / 1e9, handle.host)
        paper = lengths.prices_of(lambda plan: count(plan).paper / 1e9, handle.host)
    finally:
        handle.merger.schedule, handle.merger.asked = before
    return Prices(handle.host, macs, paper)


def meet(handle: "Handle", spec: str, batches: "Sequence[Tensor] | None" = None) -> "Schedule":
    """The schedule for `spec`. Where a budget is met on average only, it is found with the images of `batches`."""
    from dtem import schedule
    from dtem.measure import lengths
    from dtem.types import DtemError

    ladder, asked = handle.method.ladder(), schedule.parse(spec)
    if ladder is None or batches is None or not isinstance(asked, schedule.Budget):
        handle.r = spec
        return handle.merger.schedule
    prices = prices_of(handle.method.name, handle)

    @functools.cache
    def cost(step: int) -> float:
        handle.r = ladder[step]
        tokens = lengths.observed(handle.model, batches)
        return lengths.macs_at(prices.macs, tokens, handle.host).mean().item() / 1e9

    step = lengths.first_within(asked.gflops, len(ladder), cost)
    if cost(step) > asked.gflops:
        raise DtemError(f"a budget of {asked} cannot be met by {handle.method.name}: at least {cost(step):.3g} GFLOPs")
    if step and cost(step - 1) - asked.gflops < asked.gflops - cost(step):  # on average, so the nearer one
        step -= 1
    handle.r = ladder[step]
    return handle.merger.schedule


def known_to(handle: "Handle", specs: Sequence[str]) -> list[str]:
    """`specs` without a learned r where nothing is learned, and an adaptive one where nothing is calibrated."""
    unknown = {"learned"} if handle.method.schedule() is None else set()
    if handle.merger.adaptive is None:
        unknown.add("adaptive")
    return [spec for spec in specs if spec not in unknown]


def merged(
    label: str, handle: "Handle", specs: Sequence[str], batches: "Sequence[Tensor] | None" = None
) -> list[Contender]:
    """One contender per r; where nothing would be merged there is none, that is the unmerged model. Nor is there one
    for a learned r where nothing is learned, or an adaptive one where nothing is calibrated: other methods may have
    it. `batches` as in `meet`."""
    from dtem.schedule import Threshold
    from dtem.tasks.classification import evaluate

    contenders = []
    for spec in known_to(handle, specs):
        schedule = meet(handle, spec, batches)
        if not handle.merger.active:
            continue
        (forward,) = evaluate.at_rates(handle, [schedule]).values()
        if handle.method.varies or isinstance(schedule, Threshold):
            prices = prices_of(label, handle)
            contenders.append(Contender(label, spec, 0, 0, 0, Timed(forward, watched=True), prices))
        else:
            count = common.count(handle)
            contenders.append(Contender(label, spec, handle.tokens[-1], count.macs, count.paper, Timed(forward)))
    return contenders


def add_listed_argument(parser: argparse.ArgumentParser) -> None:
    """What `contestants` asks about files that adapters were trained on."""
    parser.add_argument(
        "--keep-listed",
        action="store_true",
        help="judge on files that have the name of a training file, too: where names repeat, as 1.jpg in every folder",
    )


def contestants(args: argparse.Namespace, host: "nn.Module") -> tuple[dict[str, "Handle"], dict[str, list[str]]]:
    """Patched copies of `host` by label, and the files that each was trained on. They share the host's weights.

    An adapter takes the place of its untrained method.
    """
    import dtem
    from dtem import storage
    from dtem.adapters.sharing import share
    from dtem.types import DtemError

    trained: dict[str, Handle] = {}
    lists: dict[str, list[str]] = {}
    for given in args.adapter:
        label, name = split_label(given)
        path = storage.locate(name, None)
        handle = dtem.from_pretrained(path, share(host), r=0, shortcut=args.shortcut)
        label = label or handle.method.name
        if label in trained or label == UNMERGED:
            raise DtemError(f"--adapter {given}: {label!r} is taken; give each adapter its own label, LABEL=FILE")
        trained[label] = handle
        lists[label] = [] if getattr(args, "keep_listed", False) else storage.trained_on(storage.read(path)[0])
    served = {handle.method.name for handle in trained.values()}
    handles: dict[str, Handle] = {}
    for method in common.methods(args.method):
        if method in trained and method not in served:
            raise DtemError(f"{method!r} is a method and the label of an adapter; call the adapter something else")
        if method not in served:
            handles[method] = dtem.patch(share(host), method, shortcut=args.shortcut)
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
