"""What embeddings and norms each bring over ToMe, cross-fitted: every photograph judged by adapters that never saw it.

python -m benchmarks.crossfit --data DIR --weights FILE                          five folds, three seeds
python -m benchmarks.crossfit --data DIR --weights FILE --seeds 0 --folds 1      a first look
python -m benchmarks.crossfit --data DIR --weights FILE --dtype bfloat16         faster where the CPU has it

DIR holds train, val and extra (class folders). The photographs of train and val are dealt into five folds; adapters
that are evaluated on one fold learn from the other four, and from extra. For each seed and fold two adapters are
trained without labels by --preset: one for DTEM (embeddings and norms) and one for ToMe (norms). Everything is kept in
--work: the same command again goes on where it was stopped, and --folds or --seeds can be raised later.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dtem
from benchmarks import common
from benchmarks.norms import scores
from benchmarks.reproduce import image_splits, per_image_outcomes
from dtem.measure import flops, record
from dtem.measure.statistics import mean_difference
from dtem.training.checkpoint_store import ADAPTER

RATES = (8, 13, 16)
FOLDS = 5
BASE = ("unmerged", "tome")
TRAINED = ("embeddings", "tome + norms", "embeddings + norms")
METRICS = ("top1", "cross_entropy", "kl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--preset", default="adapter")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folds", type=int, default=FOLDS, help="stop after so many folds of each seed")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of training; evaluated in float32"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/crossfit"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = {"preset": args.preset, "dtype": args.dtype, "model": args.model, "weights": args.weights.name}
    common.check_settings(args.work, names)
    deal(args.data, args.work)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    for seed in seeds:
        for fold in range(args.folds):
            cell(args, seed, fold)
    data = {name: record.data_hash(args.data / name) for name in ("train", "val", "extra")}
    path = args.out or common.RESULTS / f"crossfit_{args.model}.json"
    rows = table(args, seeds)
    record.save(record.collect("crossfit", rows, seed=seeds[0], data=str(data)), path)
    for row in rows:
        print(row)
    return 0


def deal(data: Path, work: Path) -> None:
    """Class folders of links by fold: its photographs, and the training images of adapters evaluated on it."""
    files = sorted(path for name in ("train", "val") for path in (data / name).glob("*/*") if path.is_file())
    order = np.random.default_rng(0).permutation(len(files))
    fold_of = {files[index]: place % FOLDS for place, index in enumerate(order)}
    extra = sorted((data / "extra").glob("*/*"))
    for fold in range(FOLDS):
        test = [file for file in files if fold_of[file] == fold]
        train = [file for file in files if fold_of[file] != fold]
        image_splits.link_parts({"test": test, "train": [*train, *extra]}, work / "folds" / str(fold))


def host(args: argparse.Namespace) -> nn.Module:
    return dtem.create_model(args.model, weights=args.weights).eval()


def scores_path(args: argparse.Namespace, variant: str, r: int, seed: int, fold: int) -> Path:
    """The file of the scores of one variant on one fold; the seed does not matter to an untrained one."""
    name = f"{variant}-r{r}" if variant in BASE else f"{variant}-seed{seed}-r{r}"
    path: Path = args.work / f"fold{fold}" / f"{name.replace(' ', '')}.safetensors"
    return path


def cell(args: argparse.Namespace, seed: int, fold: int) -> None:
    """Train on four folds, evaluate on the fifth; nothing is done twice."""
    if scores_path(args, TRAINED[-1], RATES[-1], seed, fold).exists():
        return
    print(f"seed {seed}, fold {fold}", file=sys.stderr, flush=True)
    data, adapters = args.work / "folds" / str(fold) / "train", {}
    for method, learn in (("dtem", ["embeddings", "norms"]), ("tome", ["norms"])):
        out = args.work / f"fold{fold}" / f"{method}-seed{seed}"
        settings = {"seed": seed, "dtype": args.dtype, "method": method, "learn": learn}
        dtem.train(host(args), data, preset=args.preset, out=out, **settings)
        adapters[method] = out / ADAPTER
    variants = {
        "tome": dtem.patch(host(args), "tome"),
        "embeddings": dtem.from_pretrained(adapters["dtem"], host(args), norms=False),
        "tome + norms": dtem.from_pretrained(adapters["tome"], host(args)),
        "embeddings + norms": dtem.from_pretrained(adapters["dtem"], host(args)),
    }
    evaluate(args, seed, fold, variants)


@torch.inference_mode()
def evaluate(args: argparse.Namespace, seed: int, fold: int, variants: dict[str, dtem.Handle]) -> None:
    """Scores of every photograph of the fold, (3, images), by variant and r."""
    model, parts = host(args), dict[tuple[str, int], list[Tensor]]()
    for batch in common.open_images(model, args.work / "folds" / str(fold) / "test").epoch(0):
        unmerged = model(batch.images).log_softmax(dim=1)
        parts.setdefault(("unmerged", 0), []).append(scores(unmerged, unmerged, batch.labels))
        for name, handle in variants.items():
            for r in RATES:
                with handle.at(r=r):
                    merged = handle.model(batch.images).log_softmax(dim=1)
                parts.setdefault((name, r), []).append(scores(merged, unmerged, batch.labels))
    for (name, r), values in parts.items():
        path = scores_path(args, name, r, seed, fold)
        path.parent.mkdir(parents=True, exist_ok=True)
        per_image_outcomes.save(torch.cat(values, dim=1), path)


def table(args: argparse.Namespace, seeds: list[int]) -> list[dict[str, Any]]:
    """A row per variant and r over all folds, seeds averaged by photograph, with paired differences."""
    macs = {r: _macs(args, r) for r in (0, *RATES)}
    rows = [row("unmerged", 0, [_pooled(args, "unmerged", 0, seeds[0])], None, None, macs[0])]
    unmerged = _pooled(args, "unmerged", 0, seeds[0])
    for r in RATES:
        tome = _pooled(args, "tome", r, seeds[0])
        rows.append(row("tome", r, [tome], None, unmerged, macs[r]))
        for name in TRAINED:
            rows.append(row(name, r, [_pooled(args, name, r, seed) for seed in seeds], tome, unmerged, macs[r]))
    return rows


def row(
    name: str, r: int, runs: list[Tensor], tome: Tensor | None, unmerged: Tensor | None, macs: dict[str, int]
) -> dict[str, Any]:
    values = torch.stack(runs).double().mean(dim=0)
    line: dict[str, Any] = {"variant": name, "r": r, "images": values.shape[1], "seeds": len(runs)}
    line |= dict(zip(METRICS, values.mean(dim=1).tolist(), strict=True))
    line["top1_by_seed"] = [run[0].double().mean().item() for run in runs]
    line["macs"] = macs["dtem" if name.startswith("embeddings") else "tome"]
    for label, other in (("tome", tome), ("unmerged", unmerged)):
        for index, metric in enumerate(METRICS):
            if other is not None:
                difference = mean_difference(values[index] - other[index].double())
                line[f"{metric}_against_{label}"] = [difference.value, difference.low, difference.high]
    return line


def _pooled(args: argparse.Namespace, variant: str, r: int, seed: int) -> Tensor:
    files = [scores_path(args, variant, r, seed, fold) for fold in range(args.folds)]
    return torch.cat([per_image_outcomes.load(file, "numbers") for file in files], dim=1)


def _macs(args: argparse.Namespace, r: int) -> dict[str, int]:
    counts = {}
    for method in ("tome", "dtem"):
        handle = dtem.patch(host(args), method, r=r)
        counts[method] = flops.count(handle.model, handle.host.image).macs
    return counts


if __name__ == "__main__":
    sys.exit(common.run(main))
