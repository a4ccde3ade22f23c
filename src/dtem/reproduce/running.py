"""Running what is not there yet. Every cell leaves its answers and a record; whoever has both is not run again."""

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

from dtem.handle import Handle
from dtem.measure import flops, record
from dtem.reproduce import answers, kendall
from dtem.reproduce.bench import Bench
from dtem.reproduce.cells import Cell
from dtem.training.judge import judge
from dtem.training.loop import train
from dtem.training.processes import Processes
from dtem.types import DtemError

KIND = "reproduce-cell"
FILE = "record.json"


def run(bench: Bench, cells: Sequence[Cell], command: Sequence[str]) -> bool:
    """Run the cells that are not done. Several of these may run side by side: each takes what no other has taken.

    Of several processes of one run, the first hears True: it is the one to speak.
    """
    processes = Processes(cpu=not torch.cuda.is_available())
    alone = processes.world == 1
    taken = []
    for number, cell in enumerate(cells, 1):
        if done(bench, cell) is not None:
            continue
        with _claimed(bench.folder_of(cell), alone, wait=False) as ours:
            if not ours:
                taken.append(cell)
                continue
            if processes.rank == 0:
                print(f"[{number}/{len(cells)}] {cell.name}", file=sys.stderr, flush=True)
            _one(bench, cell, command, processes)
    for cell in taken:
        print(f"waiting for {cell.name}, which another run has taken", file=sys.stderr, flush=True)
        with _claimed(bench.folder_of(cell), alone, wait=True):
            _one(bench, cell, command, processes)
    return processes.rank == 0


def done(bench: Bench, cell: Cell) -> dict[str, Any] | None:
    """What the record of a cell says; None where it is not there, is of other settings, or lacks what is asked for."""
    folder = bench.folder_of(cell)
    if not (folder / FILE).is_file():
        return None
    results: dict[str, Any] = record.load(folder / FILE).results
    if results.get("identity") != bench.identity(cell):
        return None
    if any(key not in results["rates"] or not _path(bench, cell, key).is_file() for key in wanted(bench, cell)):
        return None
    return results


def wanted(bench: Bench, cell: Cell) -> list[str]:
    """What is to be found of a cell, by the names under which it is kept: an r, or what is looked at in so many
    images."""
    study, rates = bench.study, list(dict.fromkeys(cell.rates.values()))
    images = study.at(bench.scale).images
    if study.measure == "kendall":
        return [f"kendall {images}"]
    return rates if study.measure == "accuracy" else [f"pictures {images} {rate}" for rate in rates]


def answer(bench: Bench, cell: Cell, key: str) -> Any:
    """What a cell that is done said of every image."""
    return answers.load(_path(bench, cell, key), kind(bench))


def kind(bench: Bench) -> str:
    """What answers are: those of a task, or numbers."""
    return bench.study.task if bench.study.measure == "accuracy" else "numbers"


def _path(bench: Bench, cell: Cell, key: str) -> Path:
    return answers.path_of(bench.folder_of(cell), kind(bench), key)


def trained(bench: Bench, cell: Cell) -> tuple[Handle, dict[str, Any]]:
    """The cell's model after its training (which goes on where it was stopped), and what the host wants of images."""
    from timm.data.config import resolve_data_config

    host = bench.host(cell)
    data_config: dict[str, Any] = resolve_data_config(model=host)  # type: ignore[no-untyped-call]
    if not cell.trained:
        return bench.untrained(cell), data_config
    return train(host, bench.config(cell), data_config).handle, data_config


def _one(bench: Bench, cell: Cell, command: Sequence[str], processes: Processes) -> None:
    if done(bench, cell) is not None:  # it was made meanwhile
        return
    folder = bench.folder_of(cell)
    kept = _earlier(bench, cell)
    start = time.perf_counter()
    handle, data_config = trained(bench, cell)
    between = time.perf_counter()
    found = _found(bench, cell, handle, data_config, [key for key in wanted(bench, cell) if key not in kept])
    if processes.rank == 0:
        for rate, (outcome, _) in found.items():
            answers.save(outcome, _path(bench, cell, rate))
        results = {
            "cell": cell.name,
            "identity": bench.identity(cell),
            "learned_from": None if not cell.trained else _count(bench, cell),
            "seconds": {"training": between - start, "evaluation": time.perf_counter() - between},
            "rates": {**kept, **{rate: metrics for rate, (_, metrics) in found.items()}},
        }
        record.save(record.collect(KIND, results, seed=cell.seed, command=command), folder / FILE)
    processes.wait()


def _earlier(bench: Bench, cell: Cell) -> dict[str, Any]:
    """What an earlier run, or another study, has found of the same cell at other rates."""
    path = bench.folder_of(cell) / FILE
    if not path.is_file():
        return {}
    results = record.load(path).results
    if results.get("identity") != bench.identity(cell):
        return {}
    asked = set(wanted(bench, cell))
    return {
        key: found for key, found in results["rates"].items() if key not in asked or _path(bench, cell, key).is_file()
    }


def _count(bench: Bench, cell: Cell) -> int | None:
    from dtem.reproduce import images

    spec = bench.learned_from(cell)
    return len(images.listed(spec)) if os.path.isdir(spec) and bench.study.task == "classification" else None


Found = dict[str, tuple[Any, dict[str, Any]]]
"""Answers and metrics by the name under which they are kept."""


def _found(bench: Bench, cell: Cell, handle: Handle, data_config: dict[str, Any], keys: list[str]) -> Found:
    """What is not there yet."""
    if bench.study.measure == "kendall":
        return dict.fromkeys(keys, _correlations(bench, cell, handle, data_config))
    if bench.study.measure == "accuracy":
        return _judged(bench, cell, handle, data_config, keys)
    from dtem.reproduce import pictures

    found: Found = {}
    for key in keys:
        shares = pictures.foreground(bench, handle, key.split()[-1])
        found[key] = shares, {"foreground": shares.mean().item(), "images": len(shares)}
    return found


def _judged(bench: Bench, cell: Cell, handle: Handle, data_config: dict[str, Any], rates: list[str]) -> Found:
    config = dataclasses.replace(bench.config(cell), eval_data=bench.splits["eval"], eval_r=",".join(rates))
    print(f"evaluating at r = {', '.join(rates)}", file=sys.stderr, flush=True)
    found: Found = {}
    for rate, (outcome, metrics) in judge(handle, config, data_config).items():
        handle.r = rate
        count = flops.count(handle.model, handle.host.image)
        found[rate] = outcome, {**metrics, "macs": count.macs, "paper": count.paper, "images": _size(outcome)}
    return found


def _size(outcome: Any) -> int:
    return len(outcome.captions) if hasattr(outcome, "captions") else len(outcome)


def _correlations(
    bench: Bench, cell: Cell, handle: Handle, data_config: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rank correlations of some images, images × blocks."""
    from tqdm import tqdm

    from dtem.tasks.classification.data import Loader, eval_transform
    from dtem.tasks.classification.evaluate import sample
    from dtem.tasks.classification.sources import open_source

    source = open_source(bench.splits["eval"])
    if wanted := bench.study.at(bench.scale).images:
        source = sample(source, wanted)
    loader, host = Loader(source, eval_transform(data_config), 10), bench.host(cell)
    handle.model.cpu().eval()
    parts = [
        kendall.correlations(host, handle, batch.images)
        for batch in tqdm(loader.epoch(0), total=loader.steps, unit="batch", file=sys.stderr, leave=False)
    ]
    found = torch.cat(parts)
    return found, {"blocks": found.mean(dim=0).tolist(), "images": len(found)}


@contextlib.contextmanager
def _claimed(folder: Path, alone: bool, wait: bool) -> Iterator[bool]:
    """Hold a cell, so that no other run works on it; False where another does. Processes of one run share it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{folder} cannot be made: {error.strerror}; choose another --work") from error
    try:
        import fcntl
    except ImportError:  # Windows: do not run two at once there
        alone = False
    if not alone:
        yield True
        return
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def typical_seconds(work: Path) -> float | None:
    """The median time of a trained cell so far; None where there is none."""
    times = []
    for path in itertools.islice(sorted((work / "cells").glob(f"*/{FILE}")), 500):
        results = record.load(path).results
        if results["learned_from"] is not None:
            times.append(sum(results["seconds"].values()))
    return sorted(times)[len(times) // 2] if times else None
