"""Merging in an encoder without a classifier: k-NN accuracy by ToMe, by embeddings, and by embeddings with norms.

python -m benchmarks.features --data DIR --weights FILE

DIR holds train and, optionally, extra (to learn from, without labels; train is also the bank of labelled neighbours),
and val (to evaluate on). Trainings are kept in --work: the same command again resumes them.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

import dtem
from benchmarks import common
from benchmarks.reproduce.image_splits import training_images
from dtem.measure import record
from dtem.training.checkpoint_store import ADAPTER

RATES = ["8", "13", "16"]
PRESETS = {"embeddings": "few", "embeddings and norms": "adapter"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of training")
    parser.add_argument("--work", type=Path, default=Path("runs/features"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"weights": args.weights, "num_classes": 0}
    images = training_images(str(args.data / "train"), 1.0, 0, args.work)
    adapters = {}
    for label, preset in PRESETS.items():
        run = dtem.train(
            dtem.create_model(args.model, **options), images, preset=preset, out=args.work / preset, dtype=args.dtype
        )
        adapters[label] = str(run.folder / ADAPTER)
    report = dtem.evaluate(
        dtem.create_model(args.model, **options),
        args.data / "val",
        r=RATES,
        adapters=adapters,
        knn=str(args.data / "train"),
    )
    rows = [dataclasses.asdict(row) for row in report.rows]
    for row in rows:
        pair = report.against_tome.get((row["method"], row["r"]))
        row["against_tome"] = None if pair is None else dataclasses.asdict(pair)
    path = args.out or common.RESULTS / "features.json"
    record.save(record.collect("features", rows, data=record.data_hash(args.data / "val")), path)
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(common.run(main))
