"""Train and evaluate the cells that have no result yet. A finished cell has per-image outcomes and a record."""

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.reproduce import image_splits, kendall, per_image_outcomes, search
from benchmarks.reproduce.cells import Cell
from benchmarks.reproduce.specs import CELL_RECORD
from benchmarks.reproduce.study_setup import StudySetup
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import open_source
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.evaluation.variants import fit_costs
from dtem.handle import Handle
from dtem.measure import flops, record, token_costs
from dtem.progress import progress_bar
from dtem.tasks.running import eval_mode, sample
from dtem.training.loop import open_accelerator
from dtem.training.processes import Processes
from dtem.training.task import open_task
from dtem.training.train import train

RECORD = "record.json"
COUNTED = 1000
"""Images whose tokens are counted, for methods that keep another number of tokens in each image."""

Results = dict[str, tuple[Any, dict[str, Any]]]
"""Per-image outcomes and metrics by result key."""


def run(setup: StudySetup, cells: Sequence[Cell], command: Sequence[str]) -> bool:
    """Run the unfinished cells. Several runs may work side by side: a cell that one has locked is left to it.

    Returns:
        Whether this is the first process, which alone prints and writes the study's record.
    """
    processes = Processes(cpu=not torch.cuda.is_available())
    lock = processes.world == 1
    locked = []
    for number, cell in enumerate(cells, 1):
        if load_results(setup, cell) is not None:
            continue
        if search.is_missing(setup, cell):
            print(f"left out: {cell.name}: {search.NOT_YET}", file=sys.stderr, flush=True)
            continue
        with _locked(setup.folder(cell), lock, wait=False) as acquired:
            if not acquired:
                locked.append(cell)
                continue
            if processes.rank == 0:
                print(f"[{number}/{len(cells)}] {cell.name}", file=sys.stderr, flush=True)
            _run_cell(setup, cell, command, processes)
    for cell in locked:
        print(f"waiting for {cell.name}, which another run is working on", file=sys.stderr, flush=True)
        with _locked(setup.folder(cell), lock, wait=True):
            _run_cell(setup, cell, command, processes)
    return processes.rank == 0


def load_results(setup: StudySetup, cell: Cell) -> dict[str, Any] | None:
    """Results of a cell's record; None if there is none, it has another identity, or a result is missing."""
    if search.is_missing(setup, cell):
        return None
    results = _recorded(setup, cell)
    if results is None:
        return None
    keys = result_keys(setup, cell)
    complete = all(key in results["rates"] and _outcomes_path(setup, cell, key).is_file() for key in keys)
    return results if complete else None


def _recorded(setup: StudySetup, cell: Cell) -> dict[str, Any] | None:
    path = setup.folder(cell) / RECORD
    if not path.is_file():
        return None
    results: dict[str, Any] = record.load_record(path).results
    return results if results.get("identity") == setup.identity(cell) else None


def result_keys(setup: StudySetup, cell: Cell) -> list[str]:
    """Keys of a cell's results: an r, or the measure with the number of images."""
    study, rates = setup.study, list(dict.fromkeys(cell.rates.values()))
    images = study.at(setup.scale).images
    if setup.measure == "kendall":
        return [f"kendall {images}"]
    return rates if setup.measure == "accuracy" else [f"pictures {images} {rate}" for rate in rates]


def load_outcomes(setup: StudySetup, cell: Cell, key: str) -> Any:
    """Per-image outcomes of a finished cell."""
    return per_image_outcomes.load(_outcomes_path(setup, cell, key), outcome_kind(setup))


def outcome_kind(setup: StudySetup) -> str:
    """The kind of per-image outcomes: a task, or "numbers" (kendall, pictures)."""
    return setup.study.task if setup.measure == "accuracy" else "numbers"


def _outcomes_path(setup: StudySetup, cell: Cell, key: str) -> Path:
    return per_image_outcomes.outcomes_path(setup.folder(cell), outcome_kind(setup), key)


def train_cell(setup: StudySetup, cell: Cell) -> Handle:
    """The cell's model after its training, which resumes where it was stopped; untrained cells as initialised."""
    if not cell.trained:
        return setup.untrained(cell)
    config = setup.config(cell)
    return train(setup.host(cell), config.data, config=config).handle


def _run_cell(setup: StudySetup, cell: Cell, command: Sequence[str], processes: Processes) -> None:
    if load_results(setup, cell) is not None:  # another run has finished it meanwhile
        return
    metrics = _recorded_metrics(setup, cell)
    missing = [key for key in result_keys(setup, cell) if key not in metrics]
    start = time.perf_counter()
    handle = train_cell(setup, cell)
    trained = time.perf_counter()
    results = _evaluate(setup, cell, handle, missing)
    if processes.rank == 0:
        for key, (outcomes, _) in results.items():
            per_image_outcomes.save(outcomes, _outcomes_path(setup, cell, key))
        document = {
            "cell": cell.name,
            "identity": setup.identity(cell),
            "trained": cell.trained,
            "training_images": _num_training_images(setup, cell) if cell.trained else None,
            "seconds": {"training": trained - start, "evaluation": time.perf_counter() - trained},
            "rates": {**metrics, **{key: value for key, (_, value) in results.items()}},
        }
        record.save(record.collect(CELL_RECORD, document, seed=cell.seed, command=command), setup.folder(cell) / RECORD)
    processes.wait()


def _recorded_metrics(setup: StudySetup, cell: Cell) -> dict[str, Any]:
    """Metrics by result key that an earlier run, or another study, has recorded for this cell."""
    results, keys = _recorded(setup, cell), result_keys(setup, cell)
    metrics = {} if results is None else results["rates"]
    return {
        key: value for key, value in metrics.items() if key not in keys or _outcomes_path(setup, cell, key).is_file()
    }


def _num_training_images(setup: StudySetup, cell: Cell) -> int | None:
    spec = setup.training_images(cell)
    if setup.study.task != "classification" or not os.path.isdir(spec):
        return None
    return len(image_splits.image_names(spec))


def _evaluate(setup: StudySetup, cell: Cell, handle: Handle, keys: list[str]) -> Results:
    if setup.measure == "kendall":
        return dict.fromkeys(keys, _rank_correlations(setup, cell, handle))
    if setup.measure == "accuracy":
        return _evaluate_task(setup, cell, handle, keys)
    from benchmarks.reproduce import foreground

    results: Results = {}
    for key in keys:
        shares = foreground.foreground_share(setup, handle, key.split()[-1])
        results[key] = shares, {"foreground": shares.mean().item(), "images": len(shares)}
    return results


def _evaluate_task(setup: StudySetup, cell: Cell, handle: Handle, rates: list[str]) -> Results:
    """The model at each r on the evaluation images, merging hard, over all processes."""
    config = dataclasses.replace(setup.config(cell), eval_data=setup.splits["eval"], eval_r=",".join(rates))
    print(f"evaluating at r = {', '.join(rates)}", file=sys.stderr, flush=True)
    accelerator = open_accelerator(config)
    task = open_task(config, handle.model, accelerator)
    handle.model.to(accelerator.device)
    results: Results = {}
    for rate, outcomes in task.evaluate(handle).items():
        images = len(outcomes.captions) if hasattr(outcomes, "captions") else len(outcomes)
        results[rate] = outcomes, {**task.metrics(outcomes), **_cost(setup, handle, rate), "images": images}
    return results


def _cost(setup: StudySetup, handle: Handle, rate: str) -> dict[str, float]:
    """Operations of one image, in both conventions; the mean over images where each has its own number of tokens."""
    if not handle.method.variable_length:
        with handle.at(r=rate):
            return dataclasses.asdict(flops.count(handle.model, handle.host.image))
    source = sample(open_source(setup.splits["eval"]), COUNTED)
    loader = Loader(source, eval_transform(resolve_data_config(handle.model)), 50)
    device = next(handle.model.parameters()).device
    with handle.at(r=rate, mode="hard"), eval_mode(handle.model):
        costs = fit_costs(handle.method.name, handle)
        tokens = token_costs.measure_tokens(handle.model, (batch.images.to(device) for batch in loader.epoch(0)))
    conventions = {"macs": costs.macs, "paper": costs.paper}
    return {name: token_costs.macs_at(each, tokens, costs.host).mean().item() for name, each in conventions.items()}


def _rank_correlations(setup: StudySetup, cell: Cell, handle: Handle) -> tuple[torch.Tensor, dict[str, Any]]:
    """Kendall's τ of the evaluation images, (images, blocks)."""
    source = open_source(setup.splits["eval"])
    if count := setup.study.at(setup.scale).images:
        source = sample(source, count)
    host = setup.host(cell)
    loader = Loader(source, eval_transform(resolve_data_config(host)), 10)
    handle.model.cpu().eval()
    parts = []
    with progress_bar(source.length, "rank correlations") as advance:
        for batch in loader.epoch(0):
            parts.append(kendall.correlations(host, handle, batch.images))
            advance(len(batch.images))
    tau = torch.cat(parts)
    return tau, {"blocks": tau.mean(dim=0).tolist(), "images": len(tau)}


@contextlib.contextmanager
def _locked(folder: Path, lock: bool, wait: bool) -> Iterator[bool]:
    """Hold the lock of a cell; yields False where another run has it. Without `lock` (several processes of one run
    share a cell) it always succeeds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{folder} cannot be made: {error.strerror}; choose another --work") from error
    try:
        import fcntl
    except ImportError:  # Windows: do not run two at once there
        lock = False
    if not lock:
        yield True
        return
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def median_seconds(work: Path) -> float | None:
    """Median time of the trained cells so far; None if there are none."""
    times = []
    for path in itertools.islice(sorted((work / "cells").glob(f"*/{RECORD}")), 500):
        results = record.load_record(path).results
        if results["trained"]:
            times.append(sum(results["seconds"].values()))
    return sorted(times)[len(times) // 2] if times else None
