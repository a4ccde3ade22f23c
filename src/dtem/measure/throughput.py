"""Timing models against each other, and the memory that a forward needs.

Clocks, other processes and temperature drift within seconds, so variants take turns: every round times each of them
once, and each is compared with the baseline of the same round. The order rotates, and runs backwards in every other
round, so that no variant always follows the same one. What is reported is the median of those ratios with its spread; a
ratio of two separate runs would mostly measure the drift.
"""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtem.errors import DtemError

Forward = Callable[[Tensor], object]


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes over the rounds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    min: float
    max: float


@dataclass(frozen=True)
class Timing:
    """Timing of one variant."""

    seconds: float
    """Median time of one forward of the whole batch."""
    images_per_second: float
    speedup: Spread
    """Time of the first variant over the time of this one, round by round."""
    rounds: tuple[float, ...] = ()
    """Seconds of every round."""

    def share_of(self, other: "Timing") -> Spread:
        """Time of `other` over the time of this one, round by round: 1 where this one is as fast."""
        return spread([theirs / own for theirs, own in zip(other.rounds, self.rounds, strict=True)])


def compare(
    variants: Mapping[str, Forward],
    batch: Tensor,
    rounds: int = 10,
    warmup: int = 2,
    *,
    rest: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time every variant on `batch`; the first one is the baseline.

    Args:
        variants: forwards by name; each is called with the batch.
        batch: the first dimension counts images; a CUDA batch makes every timing wait for the device.
        rounds: timed rounds; each times every variant once.
        warmup: rounds before those, not timed.
        rest: seconds of sleep before every timing, for runtimes with threads of their own: onnxruntime's go on spinning
            for a while after a run, and would take the next variant's cores.
        clock: seconds, as `time.perf_counter` gives them.
        progress: called after every round, outside of all timings.
    """
    if not variants:
        raise DtemError("nothing to compare: give at least one variant")
    if rounds < 1 or warmup < 0:
        raise DtemError(f"rounds = {rounds} must be 1 or more, warmup = {warmup} must be 0 or more")
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for turn in range(warmup + rounds):
            first = turn % len(names)
            order = names[first:] + names[:first]
            for name in order if turn % 2 == 0 else reversed(order):
                _synchronise(batch)
                if rest:
                    time.sleep(rest)
                start = clock()
                variants[name](batch)
                _synchronise(batch)
                if turn >= warmup:
                    seconds[name].append(clock() - start)
            if progress is not None:
                progress()
    baseline = seconds[names[0]]
    return {name: _timing(own, baseline, batch.shape[0]) for name, own in seconds.items()}


def _timing(own: list[float], baseline: list[float], images: int) -> Timing:
    median = statistics.median(own)
    speedup = spread([base / mine for base, mine in zip(baseline, own, strict=True)])
    return Timing(median, images / median, speedup, tuple(own))


def spread(values: list[float]) -> Spread:
    """Median, quartiles and extremes."""
    median = statistics.median(values)
    low, high = median, median
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, min(values), max(values))


@contextlib.contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """That many CPU threads for a while; None: as they are."""
    if threads is not None and threads < 1:
        raise DtemError(f"threads = {threads} must be 1 or more")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronise(batch: Tensor) -> None:
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)


def peak_bytes(forward: Forward, batch: Tensor) -> int:
    """Most bytes that one forward holds at a time, beyond weights and input. The same on every run.

    On CUDA: growth of the allocator's `max_memory_allocated`, which includes the workspace of kernels. On CPU: bytes of
    the tensors alive between operations, which does not; there, what a compiled model allocates cannot be seen.
    """
    with torch.no_grad():
        if batch.is_cuda:
            before = torch.cuda.memory_allocated(batch.device)
            torch.cuda.reset_peak_memory_stats(batch.device)
            forward(batch)
            torch.cuda.synchronize(batch.device)
            return torch.cuda.max_memory_allocated(batch.device) - before
        watch = _LiveBytes(batch)
        with watch:
            forward(batch)
        return watch.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operations create until they are freed."""

    def __init__(self, batch: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known.add(batch.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What goes in and is not known was there before: weights, buffers.
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _follow(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        weakref.finalize(storage, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self.live -= size
