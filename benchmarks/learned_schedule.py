"""DTEM with a learned schedule against DTEM with the same r in every block, at equal GFLOPs, image by image.

python benchmarks/learned_schedule.py --data DIR --weights FILE
python benchmarks/learned_schedule.py --data DIR --weights FILE --seeds 0 --updates 2 --limit 50    to try it out

DIR holds train, extra and val (class folders). Both learn from train and extra, by the same recipe, from the same
images in the same order; both are judged on val. The learned schedule costs no more than the constant one. A third row
runs the constant one's embeddings at the learned schedule: what the schedule does alone. Each run lives in --work, goes
on where it was stopped, and is not made again once it is there.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import common
import timm
import torch
from proof import host, link

import dtem
from dtem.measure import flops, record
from dtem.schedule import PerLayer
from dtem.tasks.classification import evaluate
from dtem.tasks.classification.data import Loader, eval_transform
from dtem.tasks.classification.outcomes import Outcomes, difference, paired
from dtem.tasks.classification.sources import open_source
from dtem.training.config import resolve
from dtem.training.loop import train

CONSTANT, LEARNED, MOVED = "constant", "learned", "constant at learned r"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--preset", default="few")
    parser.add_argument("--gflops", type=float, default=0.65)
    parser.add_argument("--updates", type=int, default=0, help="default: those of the preset")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="of training; judged in fp32")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=int, help="judge on so many images only")
    parser.add_argument("--work", type=Path, default=Path("runs/learned_schedule"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    images(args.data, args.work / "images")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    cells = [cell(args, seed) for seed in seeds]
    rows = [row for seed, found in zip(seeds, cells, strict=True) for row in summary(args, seed, found)]
    if len(seeds) > 1:
        rows += [over_seeds([found[0] for found in cells], name) for name in (LEARNED, MOVED)]
    data = {name: record.data_hash(args.data / name) for name in ("train", "extra", "val")}
    path = args.out or common.RESULTS / "learned_schedule.json"
    record.save(record.collect("learned_schedule", rows, seed=seeds[0], data=str(data)), path)
    for row in rows:
        print(row)


def images(data: Path, folder: Path) -> None:
    """One folder of links to all that is learned from."""
    if folder.exists():
        return
    beside = folder.with_suffix(".part")
    shutil.rmtree(beside, ignore_errors=True)
    link(sorted(path for name in ("train", "extra") for path in (data / name).glob("*/*") if path.is_file()), beside)
    beside.rename(folder)


def cell(args: argparse.Namespace, seed: int) -> tuple[dict[str, Outcomes], dict[str, str]]:
    """Train both with one seed. Outcomes on val, and the schedules, by name."""
    settings = {CONSTANT: {"r": f"{args.gflops}G"}, LEARNED: {"schedule": "learned", "gflops": args.gflops}}
    handles = {name: _trained(args, seed, name, flags) for name, flags in settings.items()}
    learned = str(PerLayer(handles[LEARNED].plan))
    plans = {CONSTANT: str(PerLayer(handles[CONSTANT].plan)), LEARNED: learned, MOVED: learned}
    handles[MOVED] = handles[CONSTANT]
    kept = {name: args.work / f"seed{seed}-{name.replace(' ', '-')}.safetensors" for name in plans}
    loader = Loader(open_source(str(args.data / "val")), eval_transform(_data_config(args)), 50)
    for name, path in kept.items():
        if not path.exists():
            evaluate.sweep(handles[name], loader, [plans[name]], limit=args.limit)[plans[name]].save(path)
    return {name: Outcomes.load(path) for name, path in kept.items()}, plans


def _trained(args: argparse.Namespace, seed: int, name: str, flags: dict[str, object]) -> dtem.Handle:
    """The last adapter, not the best: val chooses nothing."""
    folder = args.work / f"seed{seed}-{name}"
    print(f"seed {seed}, {name}", file=sys.stderr)
    same = {"data": str(args.work / "images"), "out": str(folder), "seed": seed, "dtype": args.dtype}
    if args.updates:
        same["updates"] = args.updates
    config, _ = resolve(args.preset, flags={**same, **flags})
    return train(host(args), config, _data_config(args)).handle


def _data_config(args: argparse.Namespace) -> dict[str, object]:
    return timm.data.resolve_data_config(model=timm.create_model(args.model))


def summary(args: argparse.Namespace, seed: int, found: tuple[dict[str, Outcomes], dict[str, str]]) -> list[dict]:
    """Each against the constant schedule, on the same images."""
    outcomes, plans = found
    handle, rows = dtem.patch(host(args)), []
    for name, own in outcomes.items():
        handle.r = plans[name]
        rows.append(
            {
                "seed": seed,
                "schedule": name,
                "r": plans[name],
                "gmacs": flops.count(handle.model, handle.host.image).macs / 1e9,
                "top1": own.top1,
                "loss": own.mean_loss,
                "against_constant": None if name == CONSTANT else dataclasses.asdict(paired(outcomes[CONSTANT], own)),
            }
        )
    return rows


def over_seeds(cells: list[dict[str, Outcomes]], name: str) -> dict:
    """The mean over seeds of each image's difference to the constant schedule, with the interval over images."""
    base, own = [found[CONSTANT] for found in cells], [found[name] for found in cells]
    top1 = [100.0 * (b.correct.double() - a.correct.double()) for a, b in zip(base, own, strict=True)]
    loss = [b.loss.double() - a.loss.double() for a, b in zip(base, own, strict=True)]
    return {
        "seeds": len(cells),
        "schedule": name,
        "top1": dataclasses.asdict(difference(torch.stack(top1).mean(dim=0))),
        "loss": dataclasses.asdict(difference(torch.stack(loss).mean(dim=0))),
    }


if __name__ == "__main__":
    main()
