"""What the benchmark scripts share: threads, and where records go."""

import argparse
from pathlib import Path

import torch

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
