"""Methods beside a frozen host, at equal GFLOPs on the same photographs: as published, and with norms of their own.

python -m benchmarks.frozen --data DIR/val --train DIR/train --train DIR/extra --weights FILE --threads 1
python -m benchmarks.frozen --data DIR/train --weights FILE --only tome,mctf,pitome,ppt --name frozen_train

Budgets are ToMe's GFLOPs at r = 8, 13 and 16. Without --train only what needs no training is run: methods without
trained parts, and the shipped adapter of DTEM, on which `similarity_terms` are tried. With it, everything that
`frozen_training` lists is trained on those photographs, without labels, and run too. --data must hold photographs that
no adapter has learned from, unless only methods without training run.

Adapters and the outcomes of each photograph lie in --work; a stopped run resumes, and what is there is not run again.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dtem
from benchmarks import common
from benchmarks.frozen_training import TRAININGS, UNTRAINED, Trainer, make_trainer
from benchmarks.norms import scores
from benchmarks.similarity_terms import DtemWithProtection, DtemWithTerms, TermsConfig
from dtem import schedule
from dtem.errors import DtemError
from dtem.evaluation.variants import file_name
from dtem.handle import Handle
from dtem.measure import flops, record
from dtem.measure.statistics import mean_difference

RATES = (8, 13, 16)
"""r of ToMe, whose GFLOPs are the budgets."""
METRICS = ("top1", "cross_entropy", "kl")
TERMS: dict[str, dict[str, Any]] = {
    "informativeness": {"tau_info": 20.0},
    "class attention": {"tau_info": 20.0, "received": False},
    "size": {"tau_size": 40.0},
    "informativeness and size": {"tau_info": 20.0, "tau_size": 40.0},
    "both directions": {"bidirectional": True},
    "informed mean": {"informed_mean": True},
    "all of MCTF": {"tau_info": 20.0, "tau_size": 40.0, "bidirectional": True, "informed_mean": True},
}


class Entry(NamedTuple):
    """A variant: how it is made, and what it is compared with besides ToMe."""

    make: Callable[[nn.Module, float], Handle]
    """Of the host and the budget."""
    learned: str
    base: str | None = None
    """The same method with one part less."""
    every_block: bool = False
    """Spread a budget over all blocks, not over the method's published ones."""
    term: bool = False
    """An experiment on DTEM's similarity."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--weights", type=Path, help="default: the published ones")
    add("--model", default="deit_tiny_patch16_224")
    add("--train", type=Path, action="append", default=[], help="photographs to learn from; may be given several times")
    add("--updates", type=int, default=250, help="of each training")
    add("--only", help="these variants, with commas; default: all")
    add(
        "--r", default=",".join(map(str, RATES)), help="ToMe's r whose GFLOPs are the budgets; terms: the last one only"
    )
    add("--name", default="frozen", help="of the record")
    add("--done", action="store_true", help="run nothing more: a record of what lies in --work")
    add("--limit", type=int, help="this many photographs only (to try things out)")
    add("--work", type=Path, default=Path("runs/frozen"))
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.work / args.name
    data = record.data_hash(args.data)
    common.check_settings(work, {"model": args.model, "limit": args.limit, "data": data})
    limits = dict(sorted(budgets(args).items(), reverse=True))
    trainer = None
    if args.train:
        smallest = min(limits.values())
        trainer = make_trainer(args.model, args.weights, args.train, args.data, smallest, args.updates, work)
    entries = entries_of(trainer, args.model)
    if args.only:
        names = list(dict.fromkeys(["tome", *args.only.split(",")]))
        if unknown := [name for name in names if name not in entries]:
            raise DtemError(f"--only {unknown[0]!r} is no variant; choose from: {', '.join(entries)}")
        entries = {name: entries[name] for name in names}
    pairs = [(r, name) for r in limits for name, entry in entries.items() if not entry.term or r == max(limits)]
    if args.done:
        pairs = [(r, name) for r, name in pairs if stored(work, name, r).exists()]
    rows = [evaluate(args, work, name, entries[name], r, limits[r]) for r, name in pairs]
    results = {"model": args.model, "budgets": {str(r): limit for r, limit in limits.items()}}
    results |= {"images": len(unmerged(args, work)), "rows": [reference(args, work), *compared(work, rows)]}
    path = record.save(record.collect(args.name, results, data=data), args.out or common.RESULTS / f"{args.name}.json")
    print(f"record: {path.name}")
    return 0


def entries_of(trainer: Trainer | None, shipped: str) -> dict[str, Entry]:
    """All variants by name, those that others are compared with before them."""
    entries = {name: Entry(lambda model, _, name=name: dtem.patch(model, name), "nothing") for name in UNTRAINED}
    entries["ppt in every block"] = Entry(lambda model, _: dtem.patch(model, "ppt"), "nothing", every_block=True)
    embedded = lambda model, _: dtem.from_pretrained(shipped, model, norms=False)  # noqa: E731
    whole = lambda model, _: dtem.from_pretrained(shipped, model)  # noqa: E731
    entries["dtem"] = Entry(embedded, "embeddings")
    entries["dtem + norms"] = Entry(whole, "embeddings and norms", base="dtem")
    for name, training in TRAININGS.items() if trainer else ():
        load = lambda model, budget, name=name: dtem.from_pretrained(trainer.adapter(name, budget), model)  # noqa: E731
        plain, plus, _ = name.partition(" + norms")
        entries[name] = Entry(load, training.learned, base=plain if plus else None)
    for name, options in TERMS.items():
        make = lambda model, budget, options=options: with_terms(whole(model, budget), options)  # noqa: E731
        entries[f"dtem + norms + {name}"] = Entry(make, "embeddings and norms", base="dtem + norms", term=True)
    entries["dtem + norms + protection"] = Entry(
        lambda model, budget: protected(whole(model, budget)), "embeddings and norms", base="dtem + norms", term=True
    )
    return entries


def with_terms(handle: Handle, options: dict[str, Any]) -> Handle:
    """The same embeddings and norms under another rule of choosing and fusing pairs."""
    method = handle.method
    method.__class__ = DtemWithTerms
    method.config = TermsConfig(**{**vars(method.config), **options})
    return handle


def protected(handle: Handle) -> Handle:
    handle.method.__class__ = DtemWithProtection
    return handle


def fresh(args: argparse.Namespace) -> nn.Module:
    return dtem.create_model(args.model, weights=args.weights).eval()


def budgets(args: argparse.Namespace) -> dict[int, float]:
    """GFLOPs of ToMe at every r."""
    handle = dtem.patch(fresh(args), "tome")
    return {r: handle.gflops((r,) * handle.host.depth) for r in map(int, args.r.split(","))}


@functools.cache
def photographs(model: str, weights: Path | None, data: Path, limit: int | None) -> list[tuple[Tensor, Tensor]]:
    """All batches, decoded once: images and labels."""
    loader = common.open_images(dtem.create_model(model, weights=weights), data, limit=limit)
    return [(batch.images, batch.labels) for batch in loader.epoch(0)]


@torch.inference_mode()
def unmerged(args: argparse.Namespace, work: Path) -> Tensor:
    """Log-probabilities of the unmerged model, (images, classes)."""
    file = work / "unmerged.pt"
    if not file.exists():
        model, batches = fresh(args), photographs(args.model, args.weights, args.data, args.limit)
        store(torch.cat([model(images).log_softmax(dim=1) for images, _ in batches]), file)
    return torch.load(file, weights_only=True)


def store(value: Any, file: Path) -> None:
    part = file.with_suffix(".part")
    torch.save(value, part)
    part.replace(file)


def stored(work: Path, name: str, r: int) -> Path:
    """The file of one variant at one budget: its plan, its cost, and the outcomes of every photograph."""
    return work / f"{file_name(name, str(r))}.pt"


def evaluate(args: argparse.Namespace, work: Path, name: str, entry: Entry, r: int, budget: float) -> dict[str, Any]:
    """The plan and the cost of a variant at one budget. The outcomes of every photograph go into `work`."""
    file = stored(work, name, r)
    if not file.exists():
        handle = entry.make(fresh(args), budget)
        base = stored(work, entry.base or "", r)
        if entry.base and not entry.term and base.exists():  # norms cost nothing
            plan = tuple(torch.load(base, weights_only=True)["about"]["plan"])
        else:
            plan = solve(handle, name, r, budget, entry.every_block)
        print(f"{name} at {budget:.3f} GFLOPs: r = {'/'.join(map(str, plan))}", file=sys.stderr, flush=True)
        with handle.at(r=plan):
            count = flops.count(handle.model, handle.host.image)
            costs = {"plan": list(plan), "macs": count.macs, "paper": count.paper}
            about = {"method": handle.method.name, **costs}
            store({"about": about, "outcomes": outcomes(args, work, handle)}, file)
    about = torch.load(file, weights_only=True)["about"]
    return {"variant": name, "learned": entry.learned, "base": entry.base, "r": r, **about}


def solve(handle: Handle, name: str, r: int, budget: float, every_block: bool) -> tuple[int, ...]:
    """The plan that meets a budget; a method that learned its plan for that budget has it already."""
    if name == "tome":
        return schedule.clamp((r,) * handle.host.depth, handle.host.patches)
    if (learned := handle.method.schedule()) is not None:
        return learned
    blocks = None if every_block else handle.method.budget_blocks
    limit = schedule.Budget(budget)
    return limit.solve(handle.host.patches, handle.host.depth, handle.gflops, blocks).values


@torch.inference_mode()
def outcomes(args: argparse.Namespace, work: Path, handle: Handle) -> Tensor:
    """Of every photograph: 100 if right, cross-entropy, KL divergence from the unmerged model, (3, images)."""
    whole, parts, start = unmerged(args, work), [], 0
    for images, labels in photographs(args.model, args.weights, args.data, args.limit):
        stop = start + len(images)
        parts.append(scores(handle.model(images).log_softmax(dim=1), whole[start:stop], labels))
        start = stop
    return torch.cat(parts, dim=1).double()


def reference(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The row of the unmerged model."""
    model, logs = fresh(args), unmerged(args, work)
    labels = torch.cat([labels for _, labels in photographs(args.model, args.weights, args.data, args.limit)])
    count = flops.count(model, dtem.patch(fresh(args), "tome").host.image)
    row = {"variant": "unmerged", "method": "none", "learned": "nothing", "base": None, "r": 0}
    return {**row, "macs": count.macs, "paper": count.paper, **summary(scores(logs, logs, labels).double())}


def summary(values: Tensor) -> dict[str, Any]:
    return dict(zip(METRICS, values.mean(dim=1).tolist(), strict=True))


def compared(work: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their means, and paired differences to ToMe and to the variant's base."""

    def read(name: str, r: int) -> Tensor:
        return torch.load(stored(work, name, r), weights_only=True)["outcomes"]

    for row in rows:
        own = read(row["variant"], row["r"])
        row |= summary(own)
        others = {"against_tome": "tome", "against_base": row["base"]}
        for key, other in others.items():
            if other not in (None, row["variant"]) and stored(work, str(other), row["r"]).exists():
                change = own - read(other, row["r"])
                paired = [mean_difference(each) for each in change]
                row[key] = {m: [d.value, d.low, d.high] for m, d in zip(METRICS, paired, strict=True)}
    return rows


if __name__ == "__main__":
    sys.exit(common.run(main))
