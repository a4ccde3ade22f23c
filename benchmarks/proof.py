"""Embeddings trained on a few thousand photographs against ToMe, image by image, on photographs they never saw.

python -m benchmarks.proof --data DIR --weights FILE                 5-fold cross-fitting over DIR/train and DIR/val
python -m benchmarks.proof --data DIR --weights FILE --seeds 0 --folds 1
python -m benchmarks.proof --data DIR --weights FILE --preset few    one training each, instead of the mean of two
python -m benchmarks.proof --data DIR --weights FILE --dtype bfloat16    faster where the CPU has it

DIR holds train, val and extra (class folders). The photographs of train and val are dealt into five folds; embeddings
that are evaluated on one fold learn from the other four, and from extra. Each (seed, fold) is a run of `dtem train` for
every preset, then `dtem average`, in --work; it goes on where it was stopped, and is not made again once it is there.
"""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import dtem
from benchmarks import common
from dtem.measure import record
from dtem.measure.statistics import mean_difference
from dtem.tasks.classification import evaluator
from dtem.tasks.classification.outcomes import Outcomes, paired
from dtem.tasks.outcome_files import pool
from dtem.training.checkpoint_store import ADAPTER

RATES = ("8", "13", "16")
FOLDS = 5
TOME = "tome"
ALL = "all"
"""In place of a seed: the mean of the adapters of all seeds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--preset", default="few+few_fisher", help="several: what they come to is averaged")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folds", type=int, default=FOLDS, help="stop after so many folds of each seed")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of training; evaluated in float32"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/proof"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = {"preset": args.preset, "dtype": args.dtype, "model": args.model, "weights": args.weights.name}
    common.check_settings(args.work, names)
    deal(args.data, args.work / "folds")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows = []
    for fold in range(args.folds):  # fold by fold, so that whatever is done so far covers all seeds
        if not done(args.work / f"{TOME}-fold{fold}"):
            evaluate(args, args.work / f"{TOME}-fold{fold}", fold, dtem.patch(host(args), "tome"), ("0", *RATES))
        for seed in seeds:
            cell(args, seed, fold)
    for seed in seeds:
        rows += summary(args, seed)
    if len(seeds) > 1:
        rows += over_seeds(args, seeds)
        for fold in range(args.folds):
            together(args, seeds, fold)
        rows += summary(args, ALL)
    data = {name: record.data_hash(args.data / name) for name in ("train", "val", "extra")}
    path = args.out or common.RESULTS / "proof.json"
    record.save(record.collect("proof", rows, seed=seeds[0], data=str(data)), path)
    for row in rows:
        print(row)


def deal(data: Path, folds: Path) -> None:
    """Folders of links: fold k's photographs, and the training images of embeddings evaluated on it."""
    if folds.exists():
        return
    beside = folds.with_suffix(".part")
    shutil.rmtree(beside, ignore_errors=True)
    files = sorted(path for name in ("train", "val") for path in (data / name).glob("*/*") if path.is_file())
    order = np.random.default_rng(0).permutation(len(files))
    fold_of = {files[index]: place % FOLDS for place, index in enumerate(order)}
    extra = sorted((data / "extra").glob("*/*"))
    for fold in range(FOLDS):
        for part, chosen in (
            ("test", [file for file in files if fold_of[file] == fold]),
            ("train", [file for file in files if fold_of[file] != fold] + extra),
        ):
            link(chosen, beside / str(fold) / part)
    beside.rename(folds)


def link(files: list[Path], folder: Path) -> None:
    """Links to images, in class folders as they were."""
    for file in files:
        made = folder / file.parent.name / file.name
        made.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to(file.resolve())


def host(args: argparse.Namespace) -> torch.nn.Module:
    return dtem.create_model(args.model, weights=args.weights)


def cell(args: argparse.Namespace, seed: int, fold: int) -> None:
    """Train on four folds, evaluate on the fifth."""
    folder = args.work / f"seed{seed}-fold{fold}"
    if done(folder):
        return
    print(f"seed {seed}, fold {fold}", file=sys.stderr)
    data = args.work / "folds" / str(fold) / "train"
    for preset in args.preset.split("+"):
        dtem.train(host(args), data, preset=preset, out=folder / preset, seed=seed, dtype=args.dtype)
    evaluate(args, folder, fold, mean(args, [folder], folder))


def together(args: argparse.Namespace, seeds: list[int], fold: int) -> None:
    """The mean of the adapters of all seeds, evaluated like one of them."""
    folder = args.work / f"seed{ALL}-fold{fold}"
    if not done(folder):
        folder.mkdir(parents=True, exist_ok=True)
        learned = mean(args, [args.work / f"seed{seed}-fold{fold}" for seed in seeds], folder)
        evaluate(args, folder, fold, learned)


def mean(args: argparse.Namespace, cells: list[Path], folder: Path) -> dtem.Handle:
    """The mean of what was learned in some cells, by every preset."""
    adapters = [cell / preset / ADAPTER for cell in cells for preset in args.preset.split("+")]
    if len(adapters) > 1:
        dtem.average_adapters(adapters, folder / "mean.safetensors")
        adapters = [folder / "mean.safetensors"]
    return dtem.from_pretrained(adapters[0], host(args))


def done(folder: Path) -> bool:
    return outcomes_path(folder, RATES[-1]).exists()


def outcomes_path(folder: Path, rate: str) -> Path:
    return folder / f"outcomes-{rate}.safetensors"


def evaluate(
    args: argparse.Namespace, folder: Path, fold: int, handle: dtem.Handle, rates: Sequence[str] = RATES
) -> None:
    """Evaluate on one fold and save the outcomes."""
    loader = common.open_images(handle.model, args.work / "folds" / str(fold) / "test")
    folder.mkdir(parents=True, exist_ok=True)
    for rate, measured in evaluator.sweep(handle, loader, rates).items():
        measured.save(outcomes_path(folder, rate))


def summary(args: argparse.Namespace, seed: int | str) -> list[dict]:
    """DTEM against ToMe at every r, over all folds that are done."""
    rows = []
    unmerged = _pooled(args, TOME, "0")
    for rate in RATES:
        ours, theirs = _pooled(args, f"seed{seed}", rate), _pooled(args, TOME, rate)
        both = paired(theirs, ours)
        rows.append(
            {
                "seed": seed,
                "r": int(rate),
                "folds": args.folds,
                "unmerged": unmerged.top1,
                "tome": theirs.top1,
                "dtem": ours.top1,
                "tome_loss": theirs.mean_loss,
                "dtem_loss": ours.mean_loss,
                "paired": dataclasses.asdict(both),
            }
        )
    return rows


def over_seeds(args: argparse.Namespace, seeds: list[int]) -> list[dict]:
    """The mean of the seeds against ToMe, photograph by photograph."""
    rows = []
    for rate in RATES:
        theirs, ours = _pooled(args, TOME, rate), [_pooled(args, f"seed{seed}", rate) for seed in seeds]
        assert all(one.names == theirs.names for one in ours)
        right = torch.stack([one.correct for one in ours]).double().mean(0)
        loss = torch.stack([one.loss for one in ours]).double().mean(0)
        rows.append(
            {
                "seed": "mean",
                "r": int(rate),
                "folds": args.folds,
                "tome": theirs.top1,
                "dtem": 100 * right.mean().item(),
                "tome_loss": theirs.mean_loss,
                "dtem_loss": loss.mean().item(),
                "paired": {
                    "n": len(theirs),
                    "top1": dataclasses.asdict(mean_difference(100 * (right - theirs.correct.double()))),
                    "loss": dataclasses.asdict(mean_difference(loss - theirs.loss.double())),
                },
            }
        )
    return rows


def _pooled(args: argparse.Namespace, name: str, rate: str) -> Outcomes:
    return pool([Outcomes.load(outcomes_path(args.work / f"{name}-fold{fold}", rate)) for fold in range(args.folds)])


if __name__ == "__main__":
    main()
