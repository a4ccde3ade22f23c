"""Does DTEM caption better than ToMe? `captioning_proof.py` cross-fitted, so that every photograph is judged.

python benchmarks/captioning_folds.py --data DIR                          everything, in runs/captioning_folds
python benchmarks/captioning_folds.py --data DIR --fold 1 --only host     a part of one fold: host, train or eval
python benchmarks/captioning_folds.py --data DIR --only table             the record, from what is there

300 photographs tell three points of CIDEr apart, no less. Here all 3,050 are dealt into three folds; a captioner and
its embeddings learn from two of them and are judged on the third, with the settings of `captioning_proof.py`. All
captions together are then scored as one set. What is done is kept in --work: the same command again goes on.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import captioning_proof
import common
import numpy as np

FOLDS = 3
HELD = 150
"""Photographs of the other folds by which the captioner's best epoch is chosen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/captioning_folds"))
    parser.add_argument("--fold", type=int, choices=range(FOLDS), help="only this one")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of embeddings in each fold")
    parser.add_argument("--only", choices=("host", "train", "eval", "table"))
    common.add_arguments(parser)
    args = parser.parse_args()
    for fold in range(FOLDS) if args.fold is None else (args.fold,):
        sys.argv = [
            "captioning_proof.py",
            "--data",
            str(deal(args.data, args.work, fold)),
            "--work",
            str(args.work / f"fold{fold}"),
            "--limit",
            "9999",
            "--rates",
            "13",
            "--seeds",
            str(args.seeds),
            "--threads",
            str(args.threads),
            "--out",
            str(args.work / f"fold{fold}.json"),
            *(["--only", args.only] if args.only else []),
        ]
        captioning_proof.main()


def deal(data: Path, work: Path, fold: int) -> Path:
    """A folder like `data` whose test split is this fold."""
    folder = work / f"data{fold}"
    (folder / "flickr8k").mkdir(parents=True, exist_ok=True)
    entries = json.loads((data / "flickr8k" / "captions.json").read_text())
    order = np.random.default_rng(0).permutation(len(entries))
    others = [row for place, row in enumerate(order) if place % FOLDS != fold]
    split = dict.fromkeys(order.tolist(), "test") | dict.fromkeys(others, "train") | dict.fromkeys(others[:HELD], "val")
    dealt = [entry | {"split": split[row]} for row, entry in enumerate(entries)]
    (folder / "flickr8k" / "captions.json").write_text(json.dumps(dealt))
    for name in ("flickr8k/images", "weights"):
        if not (folder / name).exists():
            os.symlink((data / name).resolve(), folder / name)
    return folder


if __name__ == "__main__":
    main()
