"""Make the embeddings of the shipped digit reader, and the accuracies that `dtem app` plots for it.

    python benchmarks/digits_adapter.py --out src/dtem/pretrained

Writes mnist_vit.dtem.safetensors (trained as `dtem demo` does, without labels, on the 4,000 training digits) and
mnist_vit.record.json (top-1 on the 1,000 digits that neither model nor embeddings saw, ToMe and DTEM at every r).
"""

import argparse
import copy
from pathlib import Path

import torch

import dtem
from dtem.cli import contenders, demo_case
from dtem.cli.demo_training import learn
from dtem.measure import record
from dtem.tasks.classification import evaluate

RATES = [str(r) for r in range(4, 49, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--train-r", default="48")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    case = demo_case.digits(args)
    tome = dtem.patch(copy.deepcopy(case.host), "tome")
    ours = dtem.patch(copy.deepcopy(case.host), "dtem", r=args.train_r)
    trained = learn(ours, case, args)
    del trained["seconds"]
    ours.r = 16  # what the file says unless asked otherwise
    dtem.save(ours, Path(args.out) / f"{case.name}.dtem.safetensors", trained_r=args.train_r)
    field = [contenders.Contender.unmerged(case.host, tome.host)]
    for one in RATES:
        field += [*contenders.merged("tome", tome, [one]), *contenders.merged("dtem", ours, [one])]
    with evaluate.evaluating(tome.model, ours.model):
        forwards = {contender.name: contender.forward for contender in field}
        outcomes = evaluate.compete(forwards, case.loader(case.held_out, 50))
    rows = [
        {
            "method": contender.label,
            "r": contender.r,
            "top1": outcomes[contender.name].top1,
            "cross_entropy": outcomes[contender.name].mean_loss,
            "macs": contender.macs,
            "tokens": contender.tokens,
        }
        for contender in field
    ]
    results = {"model": case.name, "data": case.data, "images": args.images, "trained": trained, "rows": rows}
    record.save(record.collect("eval", results, seed=args.seed), Path(args.out) / f"{case.name}.record.json")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
