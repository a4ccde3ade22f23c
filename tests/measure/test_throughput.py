"""Timing by a clock that the variants themselves move, so nothing here depends on the machine."""

import pytest
import torch

from dtem.errors import DtemError
from dtem.measure.throughput import compare, peak_bytes, spread


class Clock:
    """A clock, and variants that take a given time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = 1.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def variant(self, name: str, *seconds: float):
        """Takes these seconds, call by call, over and over."""

        def run(batch: torch.Tensor) -> None:
            self.now += self.pace * seconds[self.calls.count(name) % len(seconds)]
            self.calls.append(name)

        return run


def test_speedup_is_relative_to_the_first_variant() -> None:
    clock = Clock()
    variants = {"base": clock.variant("base", 4.0), "fast": clock.variant("fast", 2.0)}
    timings = compare(variants, torch.zeros(8, 1), rounds=5, warmup=1, clock=clock)
    assert list(timings) == ["base", "fast"]
    assert timings["base"].speedup.median == 1.0
    assert timings["fast"].seconds == 2.0
    assert timings["fast"].images_per_second == 4.0
    assert timings["fast"].speedup == spread([2.0])


def test_drift_between_rounds_cancels() -> None:
    clock = Clock()
    variants = {"base": clock.variant("base", 3.0), "other": clock.variant("other", 2.0)}

    def slower() -> None:
        clock.pace *= 1.5

    timings = compare(variants, torch.zeros(1, 1), rounds=6, warmup=0, clock=clock, progress=slower)
    assert timings["other"].speedup.min == pytest.approx(1.5)
    assert timings["other"].speedup.max == pytest.approx(1.5)


def test_warmup_is_not_timed() -> None:
    clock = Clock()
    cold = clock.variant("cold", 100.0, 100.0, 1.0, 1.0, 1.0)
    timings = compare({"cold": cold}, torch.zeros(1, 1), rounds=3, warmup=2, clock=clock)
    assert timings["cold"].seconds == 1.0
    assert len(clock.calls) == 5


def test_time_between_timings_does_not_count() -> None:
    clock = Clock()

    def pause() -> None:
        clock.now += 1000.0

    timings = compare({"a": clock.variant("a", 1.0)}, torch.zeros(1, 1), 3, 0, clock=clock, progress=pause)
    assert timings["a"].seconds == pytest.approx(1.0)


def test_every_round_times_each_once_in_changing_order() -> None:
    clock = Clock()
    names = ["a", "b", "c"]
    compare({name: clock.variant(name, 1.0) for name in names}, torch.zeros(1, 1), rounds=6, warmup=0, clock=clock)
    rounds = [clock.calls[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(order) == names for order in rounds)
    assert {order[0] for order in rounds} == set(names)
    neighbours = set(zip(clock.calls, clock.calls[1:], strict=False))
    assert {("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")} <= neighbours


def test_spread() -> None:
    times = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (times.min, times.low, times.median, times.high, times.max) == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert spread([7.0]).low == spread([7.0]).high == 7.0


def test_variants_run_without_gradients() -> None:
    seen = []
    compare({"a": lambda batch: seen.append(torch.is_grad_enabled())}, torch.zeros(1, 1), rounds=1, warmup=0)
    assert seen == [False]


@pytest.mark.parametrize(
    ("variants", "rounds", "warmup", "named"),
    [
        ({}, 1, 0, "nothing to compare"),
        ({"a": len}, 0, 0, "rounds = 0"),
        ({"a": len}, 1, -1, "warmup = -1"),
    ],
)
def test_what_cannot_be_timed_is_refused(variants: dict, rounds: int, warmup: int, named: str) -> None:
    with pytest.raises(DtemError, match=named):
        compare(variants, torch.zeros(1, 1), rounds, warmup)


def chain(batch: torch.Tensor) -> torch.Tensor:
    """Each step frees the one before it: never more than two alive."""
    for _ in range(5):
        batch = batch + 1
    return batch


def hoard(batch: torch.Tensor) -> list[torch.Tensor]:
    return [batch + step for step in range(5)]


@pytest.mark.parametrize(
    ("forward", "arrays"),
    [
        (chain, 2),
        (hoard, 5),
        (lambda batch: batch.view(-1)[:10], 0),
        (lambda batch: (batch + 1).mul_(2).view(4, -1), 1),
    ],
    ids=["chain", "hoard", "view", "in place"],
)
def test_peak_of_live_tensors(forward, arrays: int) -> None:
    batch = torch.zeros(100)
    assert peak_bytes(forward, batch) == arrays * batch.nbytes


def test_weights_are_not_counted() -> None:
    layer = torch.nn.Linear(16, 4)
    assert peak_bytes(layer, torch.zeros(3, 16)) == 3 * 4 * 4
    assert peak_bytes(layer, torch.zeros(3, 16)) == 3 * 4 * 4


@pytest.mark.gpu
def test_peak_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    batch = torch.zeros(1 << 20, device="cuda")
    assert peak_bytes(chain, batch) == 2 * batch.nbytes
    assert compare({"a": chain}, batch, rounds=1)["a"].seconds > 0
