"""Every rival trained alike on a few thousand photographs; then all methods at equal GFLOPs, on photographs unseen.

python -m benchmarks.rivals --data DIR --weights FILE --gflops 0.65,0.81             all of it: hours on two cores
python -m benchmarks.rivals --data DIR --weights FILE --plan                         what is left, and how long it takes
python -m benchmarks.rivals --data DIR --weights FILE --methods evit --only-train    one method's trainings
python -m benchmarks.rivals --data DIR --weights FILE --done                         evaluate what is trained so far

DIR holds train, extra (training images) and val (evaluation), as class folders. Every training has the same number of
updates of the same images in the same order, with labels and the unmerged model as teacher. What learns is the host
(rivals that are fine-tuned), the method's own parts beside a frozen host, or both, alternating (DTEM's embeddings in
one of ten updates, as published); the table says which. Learning rates: three for each kind, chosen by a short run on
photographs of train that it leaves out; never on val (with --search-updates 0 the middle one, unsearched). DTEM and its
kin are trained once, at the smallest budget, and serve all; every other method is trained once per budget, at the plan
that it is evaluated at.

Each run lives in a folder of --work; a stopped run resumes, a finished one is not repeated.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dtem
from benchmarks import common
from benchmarks.crossfit import host
from benchmarks.reproduce import image_splits, register_ablations
from dtem.errors import DtemError
from dtem.evaluation.classification import evaluate_classifiers
from dtem.evaluation.compare import comparable_methods, with_costs
from dtem.evaluation.variants import PatchedModel, RunSettings, Setup, patched_variants, solve_budget
from dtem.files import write_file
from dtem.handle import Handle
from dtem.measure import record
from dtem.tasks.classification import evaluator
from dtem.training.checkpoint_store import CHECKPOINT

LEARNING_RATES = {
    "host": (2e-6, 1e-5, 5e-5),
    "parts": (2e-4, 1e-3, 5e-3),
    "both": (2e-4, 1e-3, 5e-3),
    "rates": (2e-3, 1e-2, 5e-2),
}
"""Around what is usual for each: fine-tuning, the preset `few`, DiffRate's publication. A factor of five apart."""
HOST_PART = 0.01
"""Where both learn, the host's learning rate as a part of the other: DynamicViT's publication has this."""
TIMED = 2
"""Updates that an estimate is made from."""


class Rival(NamedTuple):
    """How a method is trained."""

    learns: str
    """What learns: ``host``, beside a frozen host the method's own ``parts`` or ``rates``, or ``both`` in turns."""
    once: bool = False
    """Trained at the smallest budget for all of them."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never mutated
    method: str = ""
    """The method, if the name under which it is trained is another."""


RIVALS = {
    "tome": Rival("host"),
    "dtem": Rival("parts", once=True),
    "evit": Rival("host", settings={"r_warmup": 1 / 3}),
    "dynamicvit": Rival("parts"),
    "diffrate": Rival("rates"),
    "tome_gumbel": Rival("parts", once=True),
    "dtem_no_prop": Rival("parts", once=True, settings={"options": {"proportional": False}}, method="dtem"),
    "patch_merger": Rival("parts"),
    "etps": Rival("host"),
    "bat": Rival("host"),
    "dtps": Rival("parts"),
    "evo_vit": Rival("host"),
    "token_pooling": Rival("host"),
    "dtps_host": Rival("both", method="dtps"),
    "dynamicvit_host": Rival("both", method="dynamicvit"),
    "patch_merger_host": Rival("both", method="patch_merger"),
    "dtem_host": Rival("both", once=True, settings={"embedding_every": 10}, method="dtem"),
}
"""In the order in which they are trained: if time runs out, what says most is there."""


def main() -> None:
    args = parse()
    register_ablations()
    torch.set_num_threads(args.threads)
    deal(args.data, args.work / "images")
    if args.plan:
        plan(args)
        return
    if args.done:
        args.methods = [name for name in args.methods if finished(args, name)]
    for name in args.methods:
        for budget in budgets_of(args, name):
            trained(args, name, budget)
    if not args.only_train:
        save(args, evaluate(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--weights", type=Path, required=True)
    add("--model", default="deit_tiny_patch16_224")
    add("--gflops", default="0.65,0.81", help="budgets (MACs), several with commas")
    add("--updates", type=int, default=200)
    add("--search-updates", type=int, default=50)
    add("--batch", type=int, default=32, help="images per update")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of training; evaluated in float32")
    add("--methods", default=",".join(RIVALS), help="those to train, with commas; default: all")
    add("--only-train", action="store_true", help="train what is missing and stop there")
    add("--plan", action="store_true", help="time a few updates of each method, print what is left to do, and stop")
    add("--done", action="store_true", help="train nothing: evaluate the methods whose trainings are finished")
    add("--limit", type=int, help="evaluate on this many images only (to try things out)")
    add("--rounds", type=int, default=10, help="timed rounds")
    add("--work", type=Path, default=Path("runs/rivals"))
    common.add_arguments(parser)
    args = parser.parse_args()
    args.budgets = [float(part) for part in args.gflops.split(",")]
    args.methods = args.methods.split(",")
    if unknown := [name for name in args.methods if name not in RIVALS]:
        parser.error(f"{unknown[0]} is not among those that are trained: {', '.join(RIVALS)}")
    return args


def deal(data: Path, images: Path) -> None:
    """Folders of links: all training images, and those of a search with its held-out part."""
    files, extra = (sorted(file for file in (data / name).glob("*/*") if file.is_file()) for name in ("train", "extra"))
    image_splits.link_parts(image_splits.hold_out(files, extra), images)


def budgets_of(args: argparse.Namespace, name: str) -> list[float]:
    """The budgets that a method is trained at."""
    return [min(args.budgets)] if RIVALS[name].once else args.budgets


def finished(args: argparse.Namespace, name: str) -> bool:
    """Whether a method has nothing left to train."""
    return not any(left(folder_of(args, name, budget), args.updates) for budget in budgets_of(args, name))


def folder_of(args: argparse.Namespace, name: str, budget: float) -> Path:
    return args.work / name / f"{budget:g}G-{args.updates}"


def method_of(name: str) -> str:
    return RIVALS[name].method or name


def trained(args: argparse.Namespace, name: str, budget: float) -> Handle:
    """The method as trained for a budget, with the learning rate that the search found."""
    lr = search(args, name)
    print(f"{name}, {budget:g} GFLOPs, learning rate {lr:g}", file=sys.stderr)
    return fit(args, name, budget, lr, "all", args.updates, folder_of(args, name, budget))


def fit(
    args: argparse.Namespace, name: str, budget: float, lr: float, images: str, updates: int, folder: Path
) -> Handle:
    """One training run."""
    rival, model = RIVALS[name], host(args)
    schedule = training_schedule(args, name, budget)
    modes: dict[str, dict[str, Any]] = {
        "host": {"mode": "finetune", "host_lr": lr},
        "both": {"mode": "end-to-end", "lr": lr, "host_lr": HOST_PART * lr, "host_r": schedule, "embedding_every": 2},
    }
    settings = {
        "method": method_of(name),
        "loss": "both",
        "updates": updates,
        "batch_size": args.batch,
        "dtype": args.dtype,
        "r": schedule,
        **modes.get(rival.learns, {"mode": "modular", "lr": lr}),
        **rival.settings,
    }
    return dtem.train(model, args.work / "images" / images, preset="few", out=folder, **settings).handle


def training_schedule(args: argparse.Namespace, name: str, budget: float) -> str:
    """The plan that the method is evaluated at; for one that learns its plan, the budget."""
    handle = dtem.patch(host(args), method_of(name))
    spec = f"{budget:g}G"
    return spec if handle.method.schedule() is not None else str(solve_budget(handle, spec))


def search(args: argparse.Namespace, name: str) -> float:
    """The learning rate whose short run, at the smallest budget, does best on what it left out."""
    rates = LEARNING_RATES[RIVALS[name].learns]
    if not args.search_updates:
        return rates[1]
    losses = {lr: held_out(args, name, lr)["cross_entropy"] for lr in rates}
    return min(losses, key=lambda lr: losses[lr])


def search_file(args: argparse.Namespace, name: str, lr: float) -> Path:
    return args.work / name / f"search-{args.search_updates}" / f"{lr:g}" / "held.json"


def held_out(args: argparse.Namespace, name: str, lr: float) -> dict[str, float]:
    """How one learning rate of the search did."""
    file = search_file(args, name, lr)
    if not file.exists():
        print(f"{name}, search, learning rate {lr:g}", file=sys.stderr)
        budget = min(args.budgets)
        try:
            handle = fit(args, name, budget, lr, "search", args.search_updates, file.parent)
        except DtemError as error:
            if "lower the learning rate" not in str(error):
                raise
            result = {"cross_entropy": float("inf"), "top1": 0.0}
        else:
            loader = common.open_images(handle.model, args.work / "images" / "held")
            rate = solve_budget(handle, f"{budget:g}G")
            (outcomes,) = evaluator.sweep(handle, loader, [rate]).values()
            result = {"cross_entropy": outcomes.mean_loss, "top1": outcomes.top1}
        write_file(file, json.dumps(result))
    return json.loads(file.read_text())


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """All methods on val, as `dtem.compare` does it: untrained where they need no training, and as trained."""
    model, specs = host(args), [f"{budget:g}G" for budget in args.budgets]
    untrained, _ = patched_variants(model, comparable_methods(model, set())[0])
    entries = [PatchedModel(name, handle, specs) for name, handle in untrained.items()]
    about = {name: {"name": name, "learned": "nothing"} for name in untrained}
    for name in args.methods:
        learned = {"host": "host", "both": "host and its own parts"}.get(RIVALS[name].learns, "its own parts")
        label = f"{method_of(name)} fine-tuned" if "host" in learned else name
        about[label] = {"name": method_of(name), "learned": learned, "lr": search(args, name)}
        for budget in budgets_of(args, name):
            handle = trained(args, name, budget)
            entries.append(PatchedModel(label, handle, specs if RIVALS[name].once else [f"{budget:g}G"]))
    settings = RunSettings(batch_size=50, limit=args.limit)
    evaluation = evaluate_classifiers(Setup(model, str(args.data / "val"), settings, args.model, patched=entries))
    document = with_costs(evaluation, args.budgets, (1, 32), args.rounds).to_dict()
    against = {(pair["method"], pair["r"]): pair for pair in document["against_tome"]}
    rows = []
    for row in document["rows"]:
        row["against_tome"] = against.get((row["method"], row["r"]))
        rows.append(row | about.get(row["method"], {"name": row["method"], "learned": "nothing"}))
    searched = {
        name: {f"{lr:g}": held_out(args, name, lr) for lr in LEARNING_RATES[RIVALS[name].learns]}
        for name in args.methods
        if args.search_updates
    }
    return {
        "model": args.model,
        "images": document["images"],
        "budgets": args.budgets,
        "updates": args.updates,
        "search_updates": args.search_updates,
        "batch": args.batch,
        "dtype": args.dtype,
        "loss": "both",
        "rows": rows,
        "searched": searched,
    }


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    data = {name: record.data_hash(args.data / name) for name in ("train", "extra", "val")}
    path = args.out or common.RESULTS / "rivals.json"
    record.save(record.collect("rivals", results, seed=0, data=str(data)), path)
    for row in results["rows"]:
        pair = row["against_tome"]
        gain = "" if pair is None else "{value:+.2f} ({low:+.2f} … {high:+.2f})".format(**pair["top1"])
        print(f"{row['method']:28} {row['r']:>6} {row['macs'] / 1e9:.3f} GFLOPs {row['top1']:6.2f} % {gain}")
    print(f"record: {path.name}; its table is drawn by benchmarks.tables where a page has <!-- table: rivals -->")


def plan(args: argparse.Namespace) -> None:
    """What is left to do, by the processor time of a few updates of each method, however busy the machine is."""
    total = 0.0
    for name in args.methods:
        lrs = LEARNING_RATES[RIVALS[name].learns]
        searching = sum(
            left(search_file(args, name, lr).parent, args.search_updates) for lr in lrs if args.search_updates
        )
        training = sum(left(folder_of(args, name, budget), args.updates) for budget in budgets_of(args, name))
        seconds = seconds_per_update(args, name) if searching + training else 0.0
        total += (hours := seconds * (searching + training) / 3600)
        line = f"{name:14} {RIVALS[name].learns:5}  {searching:4d} + {training:4d} updates of {seconds:5.2f} s"
        print(f"{line} = {hours:5.2f} h", flush=True)
    print(f"training: {total:.1f} h of processor time; then every method is run on val (minutes)")


def left(folder: Path, updates: int) -> int:
    """Updates that a run still has to make."""
    checkpoint = folder / CHECKPOINT
    return updates - (torch.load(checkpoint, weights_only=True)["update"] if checkpoint.exists() else 0)


def seconds_per_update(args: argparse.Namespace, name: str) -> float:
    """The time of a few updates, less that of a run with a single one: what every run needs anyway."""
    taken = []
    for updates in (1, 1 + TIMED):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            lr = LEARNING_RATES[RIVALS[name].learns][1]
            fit(args, name, min(args.budgets), lr, "all", updates, Path(folder))
            taken.append(time.process_time() - started)
    return (taken[1] - taken[0]) / TIMED


if __name__ == "__main__":
    main()
