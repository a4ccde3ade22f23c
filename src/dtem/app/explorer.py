"""What the explorer shows, computed: one image, one model, some methods at one r. Knows nothing of web pages.

Requests come from many threads. Handles have an r, so each model has a lock; what does not depend on the image (costs,
timings, curves) is measured once per setting and kept.
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
from dtem.tasks.classification.show import Shown
from dtem.types import DtemError
from dtem.visualise.curves import Point

UNMERGED = "unmerged"
METHODS = ("tome", "dtem", "evit", "etps", "ats", "evo_vit", "bat", "token_pooling")
"""Those that need no training, and dtem."""
ROUNDS = 5
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

    tokens: int
    gflops: float
    milliseconds: float
    speedup: float
    """Against the unmerged model, in turns with it, batch 1."""


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


class Explorer:
    """Models by name, and what was found out about them."""

    def __init__(self, models: Sequence[Model]) -> None:
        if not models:
            raise DtemError("the explorer needs a model")
        self.models = {model.name: model for model in models}
        self._locks = {name: threading.RLock() for name in self.models}
        self._handles: dict[tuple[str, str], Handle] = {}
        self._costs: dict[tuple[str, str, int], Cost] = {}
        self._seen: OrderedDict[tuple[Any, ...], tuple[Shown, dict[str, str]]] = OrderedDict()

    def explore(self, image: Any, name: str, methods: Sequence[str], r: float) -> Result:
        """Run the unmerged model and each method on one image."""
        model, r = self._model(name), self._rate(name, r)
        if not methods:
            raise DtemError("choose at least one method")
        if unknown := [method for method in methods if method not in METHODS]:
            raise DtemError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(METHODS)}")
        opened = pictures.open_image(image)
        with self._locks[name]:
            shown, refused = self._shown(opened, model, tuple(dict.fromkeys(methods)), r)
            costs = {method: self._cost(model, method, r) for method in shown.views}
            costs[UNMERGED] = self._cost(model, UNMERGED, 0)
        return Result(model, shown, costs, refused, r)

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
        digest = hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()
        key = digest, image.size, model.name, methods, r
        if key in self._seen:
            self._seen.move_to_end(key)
            return self._seen[key]
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
        self._seen[key] = dtem.show(handles, image), refused
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)
        return self._seen[key]

    def _cost(self, model: Model, method: str, r: int) -> Cost:
        key = model.name, method, r
        if key in self._costs:
            return self._costs[key]
        spec = self._spec(model.name)
        batch = torch.zeros(1, *spec.image)
        merged: nn.Module = model.host
        tokens = spec.patches + spec.prefix
        if method != UNMERGED:
            handle = self._handle(model, method)
            handle.r = r
            merged, tokens = handle.model, handle.tokens[-1]
        timings = throughput.compare({UNMERGED: model.host, method: merged}, batch, ROUNDS, 1)
        gflops = flops.count(merged, spec.image).macs / 1e9
        timing = timings[method]
        self._costs[key] = Cost(tokens, gflops, 1000 * timing.seconds, timing.speedup.median)
        return self._costs[key]


@functools.lru_cache(maxsize=16)
def measured(path: Path) -> tuple[str, dict[str, list[Point]]]:
    """What an evaluation found: a line of words about it, and points by method (`UNMERGED` among them)."""
    kept = record.load(path)
    results = kept.results
    lines: dict[str, list[Point]] = {}
    try:
        for row in results["rows"]:
            point = Point(row["macs"] / 1e9, row["top1"], f"r={row['r']}")
            lines.setdefault(row["method"], []).append(point)
        words = f"{results['model']} on {results['images']} images of {results['data']}, measured {kept.time[:10]}"
        assert lines[UNMERGED]
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
