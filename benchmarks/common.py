"""What the benchmark scripts share: threads, and where records go."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dtem.files import write_file
from dtem.measure import record

RESULTS = Path(__file__).parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="where the record goes; default benchmarks/results/NAME.json")


def keep(name: str, rows: list[dict], args: argparse.Namespace) -> None:
    path = record.save(record.collect(name, rows), args.out or RESULTS / f"{name}.json")
    print(f"record: {path.name}")


def show(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f}–{spread['high']:.2f})"


def same_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Stop if what is kept in `folder` was made with other settings; if nothing is, note these."""
    file = folder / "settings.json"
    kept = json.loads(file.read_text()) if file.exists() else settings
    for name, value in settings.items():
        if kept.get(name) != value:
            raise SystemExit(
                f"error: {folder} was made with {name} = {kept.get(name)!r}, not {value!r}; name another --work"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(settings, indent=2))
