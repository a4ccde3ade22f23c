"""Does DTEM caption better than ToMe? `captioning_proof.py` cross-fitted over all photographs.

python -m benchmarks.captioning_folds --data DIR                          everything, in runs/captioning_folds
python -m benchmarks.captioning_folds --data DIR --fold 1 --only host     a part of one fold: host, train or eval
python -m benchmarks.captioning_folds --data DIR --only table             the record, from what is there

300 photographs tell three points of CIDEr apart, no less. Here all 3,050 are dealt into three folds; a captioner and
its embeddings learn from two of them and caption the third, with the settings of `captioning_proof.py`: once with a
decoder that counts every token once, once with one that counts them by size. All captions are then scored as one set.
What is done is kept in --work: the same command again goes on.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import captioning_proof, common
from dtem.files import write_file
from dtem.measure import record
from dtem.tasks.captioning.captions import open_captions
from dtem.tasks.captioning.outcomes import CaptionOutcomes, pool, with_scores

FOLDS = 3
HELD = 150
"""Photographs of the other folds by which the captioner's best epoch is chosen."""
RATE = captioning_proof.TRAINED_AT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/captioning_folds"))
    parser.add_argument("--fold", type=int, choices=range(FOLDS), help="only this one")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of embeddings in each fold")
    parser.add_argument("--only", choices=("host", "train", "eval", "table"))
    common.add_arguments(parser)
    args = parser.parse_args()
    if args.only != "table":
        for fold in range(FOLDS) if args.fold is None else (args.fold,):
            for sizes in (False, True):
                run(args, fold, sizes)
    if args.only in (None, "table"):
        data = record.data_hash(args.data / "flickr8k" / "captions.json")
        measured = record.collect("captioning_folds", pooled(args), data=data)
        print(f"record: {record.save(measured, args.out or common.RESULTS / 'captioning_folds.json').name}")


def run(args: argparse.Namespace, fold: int, sizes: bool) -> None:
    """`captioning_proof.py` on one deal; its own record stays in --work."""
    settings = {
        "data": deal(args.data, args.work, fold),
        "work": args.work / f"fold{fold}",
        "limit": 9999,
        "rates": RATE,
        "seeds": args.seeds,
        "threads": args.threads,
        "out": args.work / f"fold{fold}.json",
    } | ({"only": args.only} if args.only else {})
    command = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    captioning_proof.main([*command, *(["--sizes"] if sizes else [])])


def deal(data: Path, work: Path, fold: int) -> Path:
    """A folder like `data` whose test split is this fold."""
    folder = work / f"data{fold}"
    (folder / "flickr8k").mkdir(parents=True, exist_ok=True)
    entries = json.loads((data / "flickr8k" / "captions.json").read_text())
    order = np.random.default_rng(0).permutation(len(entries)).tolist()
    others = [row for place, row in enumerate(order) if place % FOLDS != fold]
    split = dict.fromkeys(order, "test") | dict.fromkeys(others, "train") | dict.fromkeys(others[:HELD], "val")
    dealt = [entry | {"split": split[row]} for row, entry in enumerate(entries)]
    write_file(folder / "flickr8k" / "captions.json", json.dumps(dealt))
    for name in ("flickr8k/images", "weights"):
        if not (folder / name).exists():
            os.symlink((data / name).resolve(), folder / name)
    return folder


def pooled(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The captions of all folds as one set; rows for a decoder that counts tokens once, then by size."""
    items = open_captions(f"{args.data}/flickr8k/captions.json").items
    host, rows = args.work / "fold0" / "host", []
    for counted, mark in (("once", ""), ("by size", "-sizes")):
        files = {
            ("none", "0"): "test-none-r0-beam5.json",
            ("tome", RATE): f"test-tome{mark}-r{RATE}-beam5.json",
            **{(f"dtem-seed{seed}", RATE): name for seed, name in finished(args, mark).items()},
        }
        outcomes: dict[tuple[str, str], CaptionOutcomes] = {}
        for variant, name in files.items():
            parts = [captioning_proof.read(args.work / f"fold{fold}" / name) for fold in range(FOLDS)]
            outcomes[variant] = with_scores(pool(parts), items)
        if counted == "once":
            plain = outcomes["tome", RATE]
        for row in captioning_proof.rows_of(outcomes, host, [RATE]):
            if row["method"] != "none":
                own = [part for (name, _), part in outcomes.items() if name.startswith(row["method"])]
                row |= {"counted": counted, "against_tome_once": captioning_proof.against(plain, own)}
            elif rows:
                continue
            rows.append(row)
    return rows


def finished(args: argparse.Namespace, mark: str) -> dict[int, str]:
    """Captions by seed, of the seeds that have captioned every fold."""
    names = {seed: f"test-sparse-dtem-seed{seed}{mark}-r{RATE}-beam5.json" for seed in range(args.seeds)}
    return {
        seed: name
        for seed, name in names.items()
        if all((args.work / f"fold{fold}" / name).exists() for fold in range(FOLDS))
    }


if __name__ == "__main__":
    main()
