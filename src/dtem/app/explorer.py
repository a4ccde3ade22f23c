"""What the explorer shows, computed: one image, one model, some methods at one r. Knows nothing of web pages.

Requests come from many threads, and handles have an r: one request computes at a time, which timings need anyway. What
does not depend on the image (costs, timings) is measured once per setting and kept.
"""

import dataclasses
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import dtem
from dtem import adapters
from dtem.adapters.sharing import share
from dtem.handle import Handle
from dtem.measure import flops, record, throughput
from dtem.tasks.classification import pictures
from dtem.tasks.classification.show import Shown, view
from dtem.types import DtemError
from dtem.visualise.curves import Point

UNMERGED = "unmerged"
METHODS = ("tome", "dtem", "evit", "etps", "ats", "evo_vit", "bat", "token_pooling")
"""Those that need no training, and dtem."""
ROUNDS = 5
TRAIL = (2, 4, 8, 12, 16, 20, 24)
"""r at which an image's own curve is drawn, where no accuracies are known."""
KEPT = 64
"""Images and settings whose groups are remembered, so that the block slider only draws."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that the explorer offers."""

    name: str
    host: nn.Module
    examples: Sequence[Image.Image]
    adapter: Path | None = None
    """Trained embeddings for `dtem`."""
    record: Path | None = None
    """Of `dtem eval --out`: the accuracies that are plotted."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one method at one r costs."""

    gflops: float
    milliseconds: float
    """Of one image."""
    base: float
    """Milliseconds of the unmerged model, which it took turns with."""
    speedup: float
    """Against that, turn by turn."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything about one request."""

    model: Model
    shown: Shown
    costs: dict[str, Cost]
    """Also of the unmerged model."""
    refused: dict[str, str]
    """Methods that cannot do this here, and why."""
    r: int
    tokens: int
    """Of the unmerged model."""
    trail: dict[str, list[Point]]
    """For this image, by method: the probability (%) of what the unmerged model says, at some r."""


class Explorer:
    """Models by name, and what was found out about them."""

    def __init__(self, models: Sequence[Model]) -> None:
        if not models:
            raise DtemError("the explorer needs a model")
        self.models = {model.name: model for model in models}
        self._lock = threading.Lock()
        self._handles: dict[tuple[str, str], Handle] = {}
        self._costs: dict[tuple[str, str, int], Cost] = {}
        self._gflops: dict[tuple[str, str, int], float] = {}
        self._seen: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def explore(self, image: Any, name: str, methods: Sequence[str], r: float) -> Result:
        """Run the unmerged model and each method on one image."""
        model, r = self._model(name), self._rate(name, r)
        if not methods:
            raise DtemError("choose at least one method")
        if unknown := [method for method in methods if method not in METHODS]:
            raise DtemError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(METHODS)}")
        opened = pictures.open_image(image)
        with self._lock:
            shown, refused = self._shown(opened, model, tuple(dict.fromkeys(methods)), r)
            costs = {method: self._cost(model, method, r) for method in shown.views}
            costs[UNMERGED] = self._cost(model, UNMERGED, 0)
            wanted = shown.views if model.record is None else ()
            trail = {method: self._trail(opened, shown, model, method) for method in wanted}
        spec = self._spec(name)
        return Result(model, shown, costs, refused, r, spec.patches + spec.prefix, trail)

    def largest(self, name: str) -> int:
        """r up to which the slider goes."""
        return max(1, self._spec(name).patches // 4)

    def depth(self, name: str) -> int:
        """Blocks of a model."""
        return self._spec(name).depth

    def _spec(self, name: str) -> Any:
        host = self._model(name).host
        return adapters.find(host).describe(host)

    def _model(self, name: str) -> Model:
        if name not in self.models:
            raise DtemError(f"there is no model {name!r} here; choose from {', '.join(self.models)}")
        return self.models[name]

    def _rate(self, name: str, r: Any) -> int:
        largest = self.largest(name)
        if not isinstance(r, int | float) or not 0 <= r <= largest:
            raise DtemError(f"r = {r!r} must be a number from 0 to {largest}")
        return int(r)

    def _handle(self, model: Model, method: str) -> Handle:
        key = model.name, method
        if key not in self._handles:
            copied = share(model.host)
            if method == "dtem" and model.adapter is not None:
                self._handles[key] = dtem.from_pretrained(model.adapter, copied, r=0)
            else:
                self._handles[key] = dtem.patch(copied, method)
        return self._handles[key]

    def _shown(
        self, image: Image.Image, model: Model, methods: tuple[str, ...], r: int
    ) -> tuple[Shown, dict[str, str]]:
        key = _digest(image), model.name, methods, r
        if key in self._seen:
            self._seen.move_to_end(key)
            return self._seen[key]  # type: ignore[no-any-return]
        refused, handles = {}, {}
        for method in methods:
            try:
                handle = self._handle(model, method)
                handle.r = r
                handles[method] = handle
            except DtemError as error:
                refused[method] = str(error)
        if not handles:
            raise DtemError("; ".join(refused.values()))
        found = dtem.show(handles, image), refused
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[Any, ...], found: Any) -> None:
        self._seen[key] = found
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def _trail(self, image: Image.Image, shown: Shown, model: Model, method: str) -> list[Point]:
        """What is left of the unmerged model's answer as r grows."""
        key = _digest(image), model.name, method
        if key in self._seen:
            self._seen.move_to_end(key)
            return self._seen[key]  # type: ignore[no-any-return]
        handle, said = self._handle(model, method), int(shown.unmerged.argmax())
        x = pictures.prepare(pictures.data_config(handle.model, handle.host.image), image)
        before, points = handle.r, []
        for r in (r for r in TRAIL if r <= self.largest(model.name)):
            handle.r = r
            left = 100 * float(view(handle, x).probabilities[said])
            points.append(Point(self._count(model, method, r), left, f"r={r}"))
        handle.r = before
        self._keep(key, points)
        return points

    def _count(self, model: Model, method: str, r: int) -> float:
        """GFLOPs of a method, whose handle is at that r, or of the unmerged model."""
        key = model.name, method, r
        if key not in self._gflops:
            counted = model.host if method == UNMERGED else self._handle(model, method).model
            self._gflops[key] = flops.count(counted, self._spec(model.name).image).macs / 1e9
        return self._gflops[key]

    def _cost(self, model: Model, method: str, r: int) -> Cost:
        key = model.name, method, r
        if key in self._costs:
            return self._costs[key]
        spec = self._spec(model.name)
        merged: nn.Module = model.host
        if method != UNMERGED:
            handle = self._handle(model, method)
            handle.r = r
            merged = handle.model
        batch = torch.zeros(1, *spec.image)
        timings = throughput.compare({UNMERGED: model.host, method: merged}, batch, ROUNDS, 1)
        own, base = timings[method], timings[UNMERGED]
        cost = Cost(self._count(model, method, r), 1000 * own.seconds, 1000 * base.seconds, own.speedup.median)
        self._costs[key] = cost
        return cost


def _digest(image: Image.Image) -> tuple[Any, ...]:
    """What tells images apart."""
    return image.size, hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()


@functools.lru_cache(maxsize=16)
def measured(path: Path, model: str | None = None) -> tuple[str, dict[str, list[Point]]]:
    """What an evaluation (of `model`) found: a line of words about it, and points by method (`UNMERGED` among them)."""
    kept = record.load(path)
    results = kept.results
    lines: dict[str, list[Point]] = {}
    try:
        for row in results["rows"]:
            point = Point(row["macs"] / 1e9, row["top1"], f"r={row['r']}")
            lines.setdefault(row["method"], []).append(point)
        words = f"{results['model']} on {results['images']} images of {results['data']}, measured {kept.time[:10]}"
        assert lines[UNMERGED]
        if model is not None and results["model"].partition(".")[0] != model.partition(".")[0]:  # weights' tag aside
            raise DtemError(f"{path} is about {results['model']}, not {model}")
    except (KeyError, TypeError) as error:
        raise DtemError(f"{path} is not a record of `dtem eval`: {error!r} is missing") from error
    return words, lines


def between(points: Sequence[Point], gflops: float, label: str) -> Point | None:
    """The point of a line at some cost, straight between its neighbours; None where the line does not reach."""
    ordered = sorted(points)
    if not ordered or not ordered[0].gflops <= gflops <= ordered[-1].gflops:
        return None
    accuracy = np.interp(gflops, [p.gflops for p in ordered], [p.accuracy for p in ordered])
    return Point(gflops, float(accuracy), label)
