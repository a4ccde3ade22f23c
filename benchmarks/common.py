"""Shared by the benchmark scripts: options, records, errors."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtem import tables
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import open_source
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.measure import record
from dtem.tasks.running import sample

RESULTS = Path(__file__).resolve().parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="where the record goes; default benchmarks/results/NAME.json")


def run(function: Callable[[], int]) -> int:
    """Call `function`; returns its exit code, 2 on a `DtemError`, 130 if interrupted."""
    try:
        return function()
    except DtemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def open_images(model: nn.Module, spec: str | Path, batch_size: int = 50, limit: int | None = None) -> Loader:
    """Batches of images, preprocessed for `model`; with `limit` a fixed random sample."""
    source = open_source(str(spec))
    if limit is not None:
        source = sample(source, limit)
    return Loader(source, eval_transform(resolve_data_config(model)), batch_size)


def save_record(name: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    path = record.save(record.collect(name, rows), args.out or RESULTS / f"{name}.json")
    print(f"record: {path.name}")


def provenance(measured: record.Record) -> str:
    """Machine, versions, date and commit of a record, for table captions."""
    machine, versions = measured.machine, measured.versions
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, timm {versions['timm']}, "
        f"{measured.time[:10]}, commit {(measured.commit or 'unknown')[:7]}"
    )


def spread(quartiles: dict[str, float]) -> str:
    """A median with its quartiles, of a dict with median, low and high."""
    return tables.spread(quartiles["median"], quartiles["low"], quartiles["high"])


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Stop if `folder` holds results of other settings; if it is new, store these."""
    file = folder / "settings.json"
    stored = json.loads(file.read_text()) if file.exists() else settings
    for name, value in settings.items():
        if stored.get(name) != value:
            raise SystemExit(
                f"error: {folder} was made with {name} = {stored.get(name)!r}, not {value!r}; name another --work"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(settings, indent=2))
