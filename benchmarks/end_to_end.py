"""End-to-end training against ToMe fine-tuned with the same budget, and against embeddings alone.

python benchmarks/end_to_end.py --data DIR --weights FILE            all arms, 250 updates of 32 images each

DIR holds train, extra (learned from) and val (judged on; class folders). Every arm sees the same images in the same
order, with labels and the unmerged model as teacher, and the same number of updates. ToMe is fine-tuned once per r, as
the paper does; the others are one model for every r. Each arm is a run in --work that goes on where it was stopped.
"""

import argparse
import copy
import dataclasses
from pathlib import Path

import common
import timm
import torch
from proof import host

import dtem
from dtem.measure import record
from dtem.tasks.classification import evaluate
from dtem.tasks.classification.data import Loader, eval_transform
from dtem.tasks.classification.outcomes import Outcomes, paired
from dtem.tasks.classification.sources import open_source
from dtem.training.config import resolve
from dtem.training.loop import train

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
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="of training; judged in fp32")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = host(args)
    data_config = timm.data.resolve_data_config(model=model)
    loader = Loader(open_source(str(args.data / "val")), eval_transform(data_config), 50)
    base = evaluate.sweep(dtem.patch(copy.deepcopy(model), "tome"), loader, RATES)
    rows = [row("ToMe, untrained", rate, found, found) for rate, found in base.items()]
    for name, settings in ARMS.items():
        flags = {"data": str(learned_from(args)), "loss": "both", "updates": args.updates, "host_lr": args.host_lr}
        flags["dtype"] = args.dtype
        folder = args.work / name.replace(" ", "-")
        config, _ = resolve("few", flags={**flags, **settings, "out": str(folder)})
        handle = train(copy.deepcopy(model), config, data_config).handle
        rates = (str(settings["r"]),) if "r" in settings else RATES
        for rate, found in evaluate.sweep(handle, loader, rates).items():
            rows.append(row(name, rate, found, base[rate]))
            print(rows[-1], flush=True)
    record.save(record.collect("end_to_end", rows), args.out or common.RESULTS / "end_to_end.json")


def learned_from(args: argparse.Namespace) -> Path:
    """One folder with links to all training photographs."""
    folder = args.work / "images"
    for file in sorted(file for name in ("train", "extra") for file in (args.data / name).glob("*/*")):
        link = folder / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file.resolve())
    return folder


def row(name: str, rate: str, found: Outcomes, base: Outcomes) -> dict:
    both = dataclasses.asdict(paired(base, found))
    return {"arm": name, "r": int(rate), "top1": found.top1, "cross_entropy": found.mean_loss, "against_tome": both}


if __name__ == "__main__":
    main()
