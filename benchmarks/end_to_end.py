"""End-to-end training against ToMe fine-tuned with the same budget, and against embeddings alone.

python -m benchmarks.end_to_end --data DIR --weights FILE            all arms, 250 updates of 32 images each

DIR holds train, extra (training images) and val (evaluation; class folders). Every arm sees the same images in the same
order, with labels and the unmerged model as teacher, and the same number of updates. ToMe is fine-tuned once per r, as
the paper does; the others are one model for every r. Each arm is a run in --work that goes on where it was stopped.
"""

import argparse
import copy
import dataclasses
from pathlib import Path

import torch

import dtem
from benchmarks import common
from benchmarks.proof import host
from dtem.measure import record
from dtem.tasks.classification import evaluator
from dtem.tasks.classification.outcomes import Outcomes, paired

RATES = ("8", "13", "16")
ARMS: dict[str, dict[str, object]] = {
    "embeddings alone": {"mode": "modular"},
    "end-to-end": {"mode": "end-to-end"},
    **{f"ToMe fine-tuned at r = {r}": {"mode": "finetune", "method": "tome", "r": r} for r in RATES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--host-lr", type=float, default=5e-6)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of training; evaluated in float32"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = host(args)
    loader = common.open_images(model, args.data / "val")
    base = evaluator.sweep(dtem.patch(copy.deepcopy(model), "tome"), loader, RATES)
    rows = [row("ToMe, untrained", rate, outcomes, outcomes) for rate, outcomes in base.items()]
    for name, settings in ARMS.items():
        shared = {"loss": "both", "updates": args.updates, "host_lr": args.host_lr, "dtype": args.dtype}
        folder = args.work / name.replace(" ", "-")
        trained = dtem.train(
            copy.deepcopy(model), training_images(args), preset="few", out=folder, **{**shared, **settings}
        )
        handle = trained.handle
        rates = (str(settings["r"]),) if "r" in settings else RATES
        for rate, outcomes in evaluator.sweep(handle, loader, rates).items():
            rows.append(row(name, rate, outcomes, base[rate]))
            print(rows[-1], flush=True)
    record.save(record.collect("end_to_end", rows), args.out or common.RESULTS / "end_to_end.json")


def training_images(args: argparse.Namespace) -> Path:
    """One folder with links to all training photographs."""
    folder = args.work / "images"
    for file in sorted(file for name in ("train", "extra") for file in (args.data / name).glob("*/*")):
        link = folder / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file.resolve())
    return folder


def row(name: str, rate: str, own: Outcomes, base: Outcomes) -> dict:
    pair = dataclasses.asdict(paired(base, own))
    return {"arm": name, "r": int(rate), "top1": own.top1, "cross_entropy": own.mean_loss, "against_tome": pair}


if __name__ == "__main__":
    main()
