"""Results of the explorer: one image, one model, several methods at one r. Knows nothing of web pages.

Requests come from many threads, and a handle has one r: one request is computed at a time, which timings need anyway.
Operations and timings, which do not depend on the image, are measured once per setting and cached.
"""

import dataclasses
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import nn

import dtem
from dtem import integrations
from dtem.app import examples
from dtem.data import images
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.integrations.weight_sharing import share
from dtem.measure import flops, record, throughput
from dtem.measure.statistics import share_interval
from dtem.measure.throughput import Timing
from dtem.types import HostSpec
from dtem.visualise.curves import Point
from dtem.visualise.show import Visualisation, view_image

T = TypeVar("T")
UNMERGED = "unmerged"
METHODS = ("tome", "dtem", "evit", "etps", "ats", "evo_vit", "bat", "token_pooling")
"""Methods without training, and dtem."""
BATCH_SIZES = (1, 8, 32)
"""Batch sizes at which latency can be measured."""
ROUNDS = 5
CURVE_RATES = (2, 4, 8, 12, 16, 20, 24)
"""r at which the curve of a single image is drawn, where there is no record of accuracies."""
CACHE_SIZE = 64
"""Images and settings whose groups are cached, so that the block slider only draws."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in the explorer."""

    name: str
    host: nn.Module
    examples: Sequence[Image.Image]
    adapter: Path | None = None
    """Trained adapter for `dtem`."""
    record: Path | None = None
    """Record of `dtem eval --out`: the accuracies that are plotted."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Timings of all variants, taken in turns in one run: one baseline for all of them."""

    batch_size: int
    engine: str
    """Library, device, threads and dtype."""
    timings: dict[str, Timing]
    """By method, the unmerged model included; speed-ups are over it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one request."""

    model: Model
    visualisation: Visualisation
    gflops: dict[str, float]
    """By method, the unmerged model included."""
    refused: dict[str, str]
    """Methods that do not work on this model, and why."""
    r: int
    tokens: int
    """Of the unmerged model."""
    probability_curves: dict[str, list[Point]]
    """By method: probability (%) of the unmerged model's prediction for this image, at several r."""
    latency: Latency | None = None
    """None until it is measured (`Explorer.measure`)."""


class Explorer:
    """Explores images with several models, and caches what is reused."""

    def __init__(self, models: Sequence[Model]) -> None:
        if not models:
            raise DtemError("the explorer needs a model")
        self.models = {model.name: model for model in models}
        self._lock = threading.Lock()
        self._handles: dict[tuple[str, str], Handle] = {}
        self._latencies: dict[tuple[Any, ...], Latency] = {}
        self._gflops: dict[tuple[str, str, int], float] = {}
        self._cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def explore(self, image: Any, name: str, methods: Sequence[str], r: float) -> Result:
        """Run the unmerged model and each method on one image; `measure` adds the latency."""
        model, r = self._model(name), self._rate(name, r)
        if not methods:
            raise DtemError("choose at least one method")
        if unknown := [method for method in methods if method not in METHODS]:
            raise DtemError(f"{', '.join(map(repr, unknown))}: choose from {', '.join(METHODS)}")
        opened = images.open_image(image)
        with self._lock:
            visualisation, refused = self._visualisation(opened, model, tuple(dict.fromkeys(methods)), r)
            gflops = {UNMERGED: self._count(model, UNMERGED, 0)}
            for method in visualisation.views:
                with self._handle(model, method).at(r=r):
                    gflops[method] = self._count(model, method, r)
            predicted = int(visualisation.unmerged.argmax())
            drawn = visualisation.views if model.record is None else ()
            curves = {method: self._probability_curve(opened, predicted, model, method) for method in drawn}
        host = self._host(name)
        return Result(model, visualisation, gflops, refused, r, host.patches + host.prefix, curves)

    def measure(self, result: Result, batch_size: float) -> Result:
        """The result with its latency: all its variants in turns, in one run."""
        if batch_size not in BATCH_SIZES:
            raise DtemError(f"batch size = {batch_size!r}: choose from {', '.join(map(str, BATCH_SIZES))}")
        model, methods, r = result.model, tuple(sorted(result.visualisation.views)), result.r
        key = model.name, methods, r, batch_size
        with self._lock:
            if key not in self._latencies:
                self._latencies[key] = self._measure(model, methods, r, int(batch_size))
        return dataclasses.replace(result, latency=self._latencies[key])

    def largest(self, name: str) -> int:
        """Largest r of the slider."""
        return max(1, self._host(name).patches // 4)

    def depth(self, name: str) -> int:
        """Blocks of a model."""
        return self._host(name).depth

    def _host(self, name: str) -> HostSpec:
        host = self._model(name).host
        return integrations.find(host).describe(host)

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

    def _visualisation(
        self, image: Image.Image, model: Model, methods: tuple[str, ...], r: int
    ) -> tuple[Visualisation, dict[str, str]]:
        def compute() -> tuple[Visualisation, dict[str, str]]:
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
            shown = dtem.show(handles, image)
            assert isinstance(shown, Visualisation)  # the explorer has classifiers only
            return shown, refused

        return self._cached((_digest(image), model.name, methods, r), compute)

    def _probability_curve(self, image: Image.Image, predicted: int, model: Model, method: str) -> list[Point]:
        def compute() -> list[Point]:
            handle = self._handle(model, method)
            x = images.prepare(resolve_data_config(handle.model), image)
            points = []
            for r in (r for r in CURVE_RATES if r <= self.largest(model.name)):
                with handle.at(r=r):
                    probability = float(view_image(handle, x).probabilities[predicted])
                    points.append(Point(self._count(model, method, r), 100 * probability, f"r={r}"))
            return points

        return self._cached((_digest(image), model.name, method), compute)

    def _cached(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """The result for `key`, computed if it is not among the last ones."""
        if key not in self._cache:
            self._cache[key] = compute()
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        result: T = self._cache[key]
        return result

    def _count(self, model: Model, method: str, r: int) -> float:
        """GFLOPs of the unmerged model, or of a method whose handle is at that r."""
        key = model.name, method, r
        if key not in self._gflops:
            counted = model.host if method == UNMERGED else self._handle(model, method).model
            self._gflops[key] = flops.count(counted, self._host(model.name).image).macs / 1e9
        return self._gflops[key]

    def _measure(self, model: Model, methods: Sequence[str], r: int, batch_size: int) -> Latency:
        variants: dict[str, nn.Module] = {UNMERGED: model.host}
        for method in methods:
            handle = self._handle(model, method)
            handle.r = r
            variants[method] = handle.model
        weight = next(model.host.parameters())
        batch = torch.zeros(batch_size, *self._host(model.name).image).to(weight)
        forwards = {name: integrations.as_logits_fn(variant) for name, variant in variants.items()}
        engine = f"PyTorch {torch.__version__.partition('+')[0]}, {weight.device.type.upper()}"
        if weight.device.type == "cpu":
            engine += f", {torch.get_num_threads()} threads"
        engine += f", {str(weight.dtype).removeprefix('torch.')}"
        return Latency(batch_size, engine, throughput.compare(forwards, batch, ROUNDS, 1))


def _digest(image: Image.Image) -> tuple[Any, ...]:
    """Size and hash of the pixels."""
    return image.size, hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()


@functools.lru_cache(maxsize=16)
def load_accuracies(path: Path, model: str | None = None) -> tuple[str, dict[str, list[Point]]]:
    """Of a record of `dtem eval` (about `model`): a line about it, and points by method, `UNMERGED` included."""
    stored = record.load_record(path)
    results = stored.results
    lines: dict[str, list[Point]] = {}
    try:
        for row in results["rows"]:
            point = Point(
                row["macs"] / 1e9, row["top1"], f"r={row['r']}", share_interval(row["top1"], results["images"])
            )
            lines.setdefault(row["method"], []).append(point)
        title = f"{results['model']} on {results['images']} images of {results['data']}, measured {stored.time[:10]}"
        assert lines[UNMERGED]
        if model is not None and results["model"].partition(".")[0] != model.partition(".")[0]:  # without the tag
            raise DtemError(f"{path} is about {results['model']}, not {model}")
    except (KeyError, TypeError) as error:
        raise DtemError(f"{path} is not a record of `dtem eval`: {error!r} is missing") from error
    return title, lines


def interpolate(points: Sequence[Point], gflops: float, label: str) -> Point | None:
    """The point of a line at some cost, linearly between its neighbours; None outside of the line."""
    ordered = sorted(points, key=lambda point: point.gflops)
    if not ordered or not ordered[0].gflops <= gflops <= ordered[-1].gflops:
        return None
    accuracy = np.interp(gflops, [p.gflops for p in ordered], [p.accuracy for p in ordered])
    return Point(gflops, float(accuracy), label)


def digit_model() -> Model:
    """The digit classifier of the package, with its adapter, record and some digits: works offline."""
    from dtem.models import digits_vit

    adapter, accuracies = digits_vit.asset("dtem.safetensors"), digits_vit.asset("record.json")
    return Model(digits_vit.NAME, digits_vit.create(), examples.digits(), adapter, accuracies)
