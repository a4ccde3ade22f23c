"""`dtem.tune`: the r of every block that reaches a time on this machine with the least divergence."""

import contextlib
import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtem import schedule as schedules
from dtem.errors import DtemError
from dtem.exporters import engines
from dtem.handle import Handle
from dtem.measure import costs, throughput
from dtem.measure.tuned import TunedPlan, cost_key
from dtem.progress import progress_bar
from dtem.schedule import Budget, Constant, Latency, PerLayer
from dtem.tasks import task_of
from dtem.tuning import probes
from dtem.tuning.report import TuneReport, TuneRow
from dtem.tuning.search import Cost, Divergence, Plan, Search

Images = str | os.PathLike[str] | Sequence[Tensor]
BATCH = 16
"""Images of a forward while plans are compared."""
TOLERANCE = 1.02
"""A plan that takes longer than this times the target is tuned again, once, by its measured time."""
CURVE = (4, 8, 11, 13, 16)
"""r of the curve, for 12 blocks and 196 patches; as large a share for others."""


def tune(
    handle: Handle,
    data: Images | None = None,
    target: str | None = None,
    *,
    batch_size: int = 1,
    engine: str = "eager",
    dtype: str | None = None,
    threads: int | None = None,
    limit: int = 256,
    test_data: Images | None = None,
    curve: bool = False,
    refresh: bool = False,
    rounds: int | None = None,
    progress: bool = True,
) -> TuneReport:
    """Choose r for every block, for a time on this machine, with the least divergence from the unmerged model.

    What a block costs by its number of tokens, and what merging costs, is measured once and kept in the user's cache.
    Plans are compared on photographs without labels, and the best one is timed. The handle then has that plan, and
    ``handle.save_pretrained`` stores it: ``from_pretrained(file, model, r="tuned")``.

    Args:
        handle: of a patched model.
        data: photographs: a folder, ``timm:…``, ``hf:…``, ``wds:…``, or batches of preprocessed images. None: measure
            the costs alone, so that ``r="12ms"`` and ``r="1.8x"`` work.
        target: ``1.8x`` (as fast as unmerged), ``12ms`` (for one batch) or ``0.8G`` (GFLOPs, multiply-adds).
        batch_size: that the model is served with.
        engine: that it is served by: eager, onnx or openvino.
        dtype: of a file: float32, bfloat16 or int8; None: that of the model.
        threads: CPU threads; None: as they are.
        limit: number of photographs.
        test_data: other photographs, on which the plans are judged as well.
        curve: tune for the times of several constant r, and compare both; `target` is then left out.
        refresh: measure the costs again.
        rounds: timed rounds of the plans; None: as many as take some twenty seconds.
        progress: show a progress bar on stderr.

    Examples:
        >>> handle = dtem.patch(model, r=8)
        >>> report = dtem.tune(handle, "photos", "1.8x", batch_size=1)  # doctest: +SKIP
        >>> handle.save_pretrained("tuned.safetensors")
    """
    wanted = None if target is None else schedules.parse(target)
    _check(handle, wanted, target, data, curve, engine, dtype, batch_size, limit)
    images = None if data is None else batches(handle, data, limit)  # refused, if at all, before costs are measured
    with throughput.cpu_threads(threads):
        table = cost_table(handle, batch_size, engine, dtype, refresh, progress)
        if wanted is None and not curve:
            return make_report(handle, table, [], None)
        assert images is not None
        divergence = Divergence(handle, images)
        with progress_bar(None, "comparing plans", "plan", show=progress) as advance:
            search = make_search(handle, divergence, plan_cost(handle, table, wanted), advance)
            if curve:
                plans = curve_plans(handle, search)
            else:
                assert isinstance(wanted, Budget | Latency)
                plans = [_pair(search, _limit(wanted, table))]
        timings = time_pairs(handle, plans, batch_size, engine, dtype, rounds, progress)
        excess = 1.0 if curve else _excess(handle, wanted, plans[0][1], timings)
        if excess > TOLERANCE:
            with contextlib.suppress(DtemError):  # it cannot be that fast: the report says what it takes
                plans = [_pair(search, search.cost(plans[0][1]) / excess, [plans[0][1]])]
            timings = time_pairs(handle, plans, batch_size, engine, dtype, rounds, progress)
        tests = None if test_data is None else Divergence(handle, batches(handle, test_data, None))
        rows = make_rows(plans, timings, table, divergence, tests, handle)
        report = make_report(handle, table, rows, divergence, wanted)
        if not curve:
            row = report.rows[-1]
            handle.merger.tuned = TunedPlan(
                plan=row.plan,
                target=str(wanted),
                batch=batch_size,
                engine=engine,
                dtype=table.key.dtype,
                threads=table.key.threads,
                machine=costs.cpu_name(),
                milliseconds=1000 * row.seconds,
                speedup=row.speedup.median,
                divergence=row.divergence,
            )
            handle.r = PerLayer(row.plan)
        return report


def batches(handle: Handle, data: Images, limit: int | None) -> list[Tensor]:
    """Preprocessed photographs, in batches; of a source so many, drawn at random, the same every time."""
    from dtem.data import sources
    from dtem.data.loader import Loader
    from dtem.data.preprocessing import resolve_data_config
    from dtem.data.transforms import eval_transform
    from dtem.tasks.running import sample

    if not isinstance(data, str | os.PathLike):
        return [part for images in data for part in torch.split(images, BATCH)]
    source = sources.open_source(os.fspath(data))
    if limit is not None:
        source = sample(source, limit)
    loader = Loader(source, eval_transform(resolve_data_config(handle.model)), BATCH)
    return [batch.images for batch in loader.epoch(0)]


def _check(
    handle: Handle,
    wanted: object,
    target: str | None,
    data: object,
    curve: bool,
    engine: str,
    dtype: str | None,
    batch_size: int,
    limit: int,
) -> None:
    if not isinstance(handle, Handle):
        raise DtemError(f"tune takes the handle that dtem.patch returned, not a {type(handle).__name__}")
    weight = next(handle.model.parameters())
    engines.check_engine(engine, dtype or str(weight.dtype).removeprefix("torch."), weight.device.type)
    if engine == "compile":
        raise DtemError("engine = 'compile' would compile again for every plan: tune for eager, onnx or openvino")
    if engine == "eager" and dtype not in (None, str(weight.dtype).removeprefix("torch.")):
        raise DtemError(f"dtype = {dtype!r}: the model is {weight.dtype}; convert it first, model.to(…)")
    if wanted is not None and not isinstance(wanted, Budget | Latency):
        raise DtemError(f"target = {target!r} is not a cost; write 1.8x, 12ms or 0.8G")
    if isinstance(wanted, Latency) and wanted.batch not in (1, batch_size):
        raise DtemError(f"target = {target!r} is for batch size {wanted.batch}, and batch_size = {batch_size}")
    if curve and wanted is not None:
        raise DtemError(f"target = {target!r}: a curve has targets of its own; leave one of them out")
    if data is None and (curve or wanted is not None):
        raise DtemError("plans are compared on photographs: give data, a folder of them; labels are not needed")
    if batch_size < 1 or limit < 1:
        raise DtemError(f"batch_size = {batch_size} and limit = {limit} must be 1 or more")
    if task_of(handle.model) == "answering":
        raise DtemError(
            f"{handle.host.name} answers questions: tuning compares one vector for an image, and times the tower "
            "alone. Tune r for its vision tower as a model of its own, or choose r with dtem ask"
        )
    method = handle.method
    if handle.host.dense or method.variable_length or method.restores:
        raise DtemError(
            f"method {method.name!r} on {handle.host.name}: tuning is for methods that remove r tokens in a block for "
            "good, and models that give one vector for an image"
        )


def cost_table(
    handle: Handle, batch: int, engine: str, dtype: str | None, refresh: bool, progress: bool
) -> costs.CostTable:
    """From the cache, or measured now."""
    table = None if refresh else costs.load(cost_key(handle.model, batch, engine, dtype))
    if table is None:
        with progress_bar(None, "measuring costs", "step", show=progress) as advance:
            table = probes.measure(handle, batch, engine, dtype, advance)
        costs.save(table)
    return table


def plan_cost(handle: Handle, table: costs.CostTable, wanted: object) -> Cost:
    """Seconds of a plan by the table, or its GFLOPs."""
    host = handle.host
    if isinstance(wanted, Budget):
        plans = probes.probe_plans(host, handle.stages, probes.PROBES, handle.method.resets_each_block)
        unmerged = handle.gflops((0,) * host.depth)
        table = costs.fit(table.key, host, unmerged, plans, [handle.gflops(plan) for plan in plans])
    return functools.cache(lambda plan: table.seconds(plan, host))


def _limit(wanted: Budget | Latency, table: costs.CostTable) -> float:
    return wanted.gflops if isinstance(wanted, Budget) else wanted.limit(table.unmerged)


def _excess(handle: Handle, wanted: object, plan: Plan, timings: dict[str, throughput.Timing]) -> float:
    """What a plan takes, timed or counted, over what was asked for."""
    if isinstance(wanted, Budget):
        return TOLERANCE * handle.gflops(plan) / wanted.gflops
    assert isinstance(wanted, Latency)
    return timings[str(PerLayer(plan))].seconds / wanted.limit(timings[probes.UNMERGED].seconds)


def make_search(handle: Handle, divergence: Divergence, cost: Cost, advance: Any = lambda count: None) -> Search:
    """The search for plans of this model."""
    stages = handle.stages
    blocks = tuple(range(handle.host.depth) if stages is None else sorted(stages))
    return Search(divergence, cost, handle.host, blocks, handle.method.resets_each_block, advance)


def _even(search: Search, limit: float) -> Plan:
    """The even plan with the fewest removed tokens within the limit."""
    if search.cost((0,) * search.host.depth) <= limit:
        raise DtemError("the unmerged model meets the target already: nothing would be merged; ask for more")
    host, blocks = search.host, search.blocks
    for total in range(1, host.patches // 2 * len(blocks) + 1):
        plan = schedules.even_plan(total, host.patches, host.depth, blocks, search.resets_each_block)
        if search.cost(plan) <= limit:
            return plan
    raise DtemError(
        "the target cannot be reached by the same r in every block: even merging as much as possible is slower"
    )


def _pair(search: Search, limit: float, more: Collection[Plan] = ()) -> tuple[Plan, Plan]:
    """The even plan and the tuned one; that is the even one where none is better on all images."""
    even = _even(search, limit)
    tuned = search.run(limit, [even, *more])
    return even, min(even, tuned, key=search.divergence.mean)


def curve_plans(handle: Handle, search: Search, rates: Sequence[int] = CURVE) -> list[tuple[Plan, Plan]]:
    """Constant r, for 12 blocks and 196 patches, each with the plan that is tuned for its time."""
    host, found = handle.host, []
    before: list[Plan] = []
    for r in rates:
        r = max(1, round(r * host.patches * 12 / (196 * host.depth)))
        even = search.clamped(
            [value * (layer in search.blocks) for layer, value in enumerate(Constant(r).per_block(host.depth))]
        )
        tuned = search.run(search.cost(even), [even, *before])
        tuned = min(even, tuned, key=search.divergence.mean)
        before = [tuned]
        found.append((even, tuned))
    return found


def time_pairs(
    handle: Handle,
    plans: Sequence[tuple[Plan, Plan]],
    batch: int,
    engine: str,
    dtype: str | None,
    rounds: int | None,
    progress: bool = True,
) -> dict[str, throughput.Timing]:
    """Times of the plans of all pairs, taking turns."""
    every = list(dict.fromkeys(plan for pair in plans for plan in pair if any(plan)))
    with progress_bar(None, "timing plans", "step", show=progress) as advance:
        return probes.time_plans(handle, every, batch, engine, dtype, rounds, advance)


def make_rows(
    plans: Sequence[tuple[Plan, Plan]],
    timings: dict[str, throughput.Timing],
    table: costs.CostTable,
    divergence: Divergence,
    tests: Divergence | None,
    handle: Handle,
) -> list[TuneRow]:
    """One row for the unmerged model, and one for each plan."""
    unmerged = (0,) * handle.host.depth
    named = [("unmerged", unmerged)] + [
        pair for even, tuned in plans for pair in (("constant", even), ("tuned", tuned))
    ]
    rows = []
    for name, plan in named:
        timing = timings[probes.UNMERGED if plan == unmerged else str(PerLayer(plan))]
        own = divergence.of(plan)[0]
        test = None if tests is None else tests.of(plan)[0]
        rows.append(
            TuneRow(
                name=name,
                plan=plan,
                seconds=timing.seconds,
                predicted=table.seconds(plan, handle.host),
                speedup=timing.speedup,
                divergence=float(own.mean()),
                test_divergence=None if test is None else float(test.mean()),
                test_error=None if test is None or len(test) < 2 else float(test.std() / len(test) ** 0.5),
            )
        )
    return rows


def make_report(
    handle: Handle, table: costs.CostTable, rows: list[TuneRow], divergence: Divergence | None, wanted: object = None
) -> TuneReport:
    """The report on these rows."""
    host = handle.host
    return TuneReport(
        model=host.name,
        method=handle.method.name,
        target=None if wanted is None else str(wanted),
        batch=table.key.batch,
        engine=table.key.engine,
        dtype=table.key.dtype,
        threads=table.key.threads,
        machine=table.key.cpu,
        table_error=table.error,
        divergence=None if divergence is None else divergence.kind,
        images=0 if divergence is None else sum(len(batch) for batch in divergence.batches),
        rows=rows,
        tokens={row.text: list(schedules.tokens(row.plan, host.patches, host.prefix)) for row in rows},
        block_milliseconds={row.text: [1000 * part for part in table.block_seconds(row.plan, host)] for row in rows},
        constant_milliseconds={
            str(r): 1000 * table.seconds(schedules.clamp([r] * host.depth, host.patches), host) for r in CURVE
        },
        cache=Path(table.key.path).name,
    )
