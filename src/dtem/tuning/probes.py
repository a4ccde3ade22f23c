"""Costs of a model on this machine, from the times of whole forwards at some plans."""

import copy
import itertools
import random
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from dtem.exporters import engines
from dtem.handle import Handle
from dtem.measure import costs, throughput
from dtem.measure.tuned import cost_key
from dtem.schedule import PerLayer, clamp, even_plan
from dtem.types import HostSpec

Plan = tuple[int, ...]
PROBES, FILE_PROBES = 40, 10
"""Number of plans that are timed; fewer where each has to be exported."""
SECONDS = 20.0
"""Time to spend on timing, about."""
MIN_ROUNDS, MAX_ROUNDS = 5, 25


def probe_plans(host: HostSpec, stages: Collection[int] | None, count: int, resets: bool = False) -> list[Plan]:
    """Plans of many kinds: even ones in all blocks and in a few, single large merges, and random ones."""
    blocks = sorted(range(host.depth) if stages is None else stages)
    spaced = [blocks[first::every] for every in (1, 3, 2, 4) for first in ({0, every - 1})]
    even = [
        even_plan(int(share * host.patches), host.patches, host.depth, chosen, resets)
        for share, chosen in itertools.product((0.9, 0.3, 0.6), spaced)
    ]
    half = host.patches // 2
    all_there_is = [clamp([r] * host.depth, host.patches, resets) for r in (half, -(-host.patches // len(blocks)))]
    single = [
        clamp([half if layer == chosen else 0 for layer in range(host.depth)], host.patches, resets)
        for chosen in blocks[:: max(1, len(blocks) // 4)]
    ]
    generator = random.Random(0)
    drawn = []
    for _ in range(count):
        some = [layer for layer in blocks if generator.random() < 0.6]
        drawn.append(
            clamp(
                [generator.randrange(2 * half // 3 + 1) if layer in some else 0 for layer in range(host.depth)],
                host.patches,
                resets,
            )
        )
    allowed = [tuple(r * (layer in blocks) for layer, r in enumerate(plan)) for plan in all_there_is]
    plans = [even[0], *allowed, *single[:1], *even[1:], *single[1:], *drawn]
    return [plan for plan in dict.fromkeys(plans) if any(plan)][:count]


def measure(
    handle: Handle,
    batch: int,
    engine: str = "eager",
    dtype: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> costs.CostTable:
    """Time the probe plans against each other and the unmerged model, and fit the table. The handle stays as it was."""
    key = cost_key(handle.model, batch, engine, dtype)
    method = handle.method
    count = PROBES if engine == "eager" else FILE_PROBES
    plans = probe_plans(handle.host, handle.stages, count, method.resets_each_block)
    timings = time_plans(handle, plans, batch, engine, dtype, progress=progress)
    unmerged = timings[UNMERGED].seconds
    seconds = [unmerged / timings[str(PerLayer(plan))].speedup.median for plan in plans]
    return costs.fit(key, handle.host, unmerged, plans, seconds)


UNMERGED = "unmerged"


def time_plans(
    handle: Handle,
    plans: Collection[Plan],
    batch: int,
    engine: str = "eager",
    dtype: str | None = None,
    rounds: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, throughput.Timing]:
    """Times of plans, by their text, and of the unmerged model, taking turns."""
    precision = dtype or str(next(handle.model.parameters()).dtype).removeprefix("torch.")
    models: dict[str, nn.Module] = {UNMERGED: Handle(shared_copy(handle.model)).unpatch().eval()}
    for plan in plans:
        merged = Handle(shared_copy(handle.model).eval())
        merged.mode, merged.r = "hard", PerLayer(plan)
        models[str(PerLayer(plan))] = merged.model
    done = progress or (lambda count: None)
    forwards: dict[str, throughput.Forward] = {}
    for name, model in models.items():
        forwards[name] = engines.build(model, engine, precision)
        done(1)
    weight = next(handle.model.parameters())
    images = torch.randn(batch, *handle.host.image, generator=torch.Generator().manual_seed(0))
    images = images.to(weight.device, engines.input_dtype(engine, precision))
    rest = engines.REST.get(engine, 0.0)
    rounds = rounds or affordable_rounds(forwards[UNMERGED], images, len(forwards), rest)
    return throughput.compare(forwards, images, rounds, warmup=2, rest=rest, progress=lambda: done(1))


def affordable_rounds(forward: throughput.Forward, images: Tensor, variants: int, rest: float) -> int:
    """Rounds that take about SECONDS."""
    once = throughput.compare({"": forward}, images, rounds=3, warmup=1)[""].seconds + rest
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS / (once * variants))))


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy with the same weights in memory."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
