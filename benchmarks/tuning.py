"""Divergence against latency: constant r and tuned plans, on photographs that the plans were not tuned on.

In three steps, since times need an idle machine and the search does not:

python -m benchmarks.tuning measure --data imagenet --weights WEIGHTS         costs, into the user's cache
python -m benchmarks.tuning search --data imagenet --weights WEIGHTS --work plans.json
python -m benchmarks.tuning time --data imagenet --weights WEIGHTS --work plans.json

WEIGHTS is a folder with the published weights. Plans are tuned on part of `train` and judged on part of `val`.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch

import dtem
from benchmarks import common
from dtem.files import write_file
from dtem.tuning import tune
from dtem.tuning.search import Divergence

MODELS = {
    "deit_tiny_patch16_224": "deit_tiny_patch16_224.fb_in1k.safetensors",
    "vit_tiny_patch16_224": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
}


def handle_of(name: str, weights: Path) -> dtem.Handle:
    """The model with its shipped adapter."""
    model = dtem.create_model(name, weights=weights / MODELS[name])
    return dtem.from_pretrained(name, model.float(), r=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("measure", "search", "time"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--r", default="8,13,16", help="constant r whose times are tuned for")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--work", help="JSON file with the plans; for times several, with commas")
    parser.add_argument("--images", type=int, default=128, help="to tune on")
    parser.add_argument("--test-images", type=int, default=400, help="to judge on")
    parser.add_argument("--rounds", type=int, help="timed rounds")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    works = [] if args.work is None else [Path(each) for each in args.work.split(",") if Path(each).exists()]
    found = {case: plans for each in works for case, plans in json.loads(each.read_text()).items()}
    rows = []
    for name in args.models.split(","):
        handle = handle_of(name, args.weights)
        images = None
        for batch in map(int, args.batch.split(",")):
            case = f"{name} {batch}"
            table = tune.cost_table(handle, batch, "eager", None, args.step == "measure", True)
            print(f"{case}: costs fitted to {100 * table.error:.1f} %", flush=True)
            if args.step == "search":
                images = images or Divergence(handle, tune.batches(handle, args.data / "train", args.images))
                search = tune.make_search(handle, images, tune.plan_cost(handle, table, None))
                pairs = tune.curve_plans(handle, search, list(map(int, args.r.split(","))))
                tests = Divergence(handle, tune.batches(handle, args.data / "val", args.test_images))
                plans = dict.fromkeys(plan for pair in pairs for plan in pair)
                judged = {str(list(plan)): tests.of(plan)[0].tolist() for plan in plans}
                own = {str(list(plan)): images.mean(plan) for plan in plans}
                found[case] = {"pairs": pairs, "tests": judged, "own": own}
                write_file(args.work, json.dumps(found))
                for even, tuned in pairs:
                    values = [sum(judged[str(list(plan))]) / len(judged[str(list(plan))]) for plan in (even, tuned)]
                    print(f"{even} {values[0]:.4f} -> {tuned} {values[1]:.4f}", flush=True)
            if args.step == "time":
                rows += timed(handle, name, batch, found[case], args)
    if args.step == "time":
        common.save_record("tuning", rows, args)


def timed(handle: dtem.Handle, name: str, batch: int, found: dict, args: argparse.Namespace) -> list[dict]:
    """Rows of one model and batch size: pairs of a constant and a tuned plan, timed in one run."""
    pairs = [tuple(map(tuple, pair)) for pair in found["pairs"]]
    timings = tune.time_pairs(handle, pairs, batch, "eager", None, args.rounds)
    unmerged = timings[tune.probes.UNMERGED].seconds
    rows = []
    for even, tuned in pairs:
        row = {"model": name, "batch": batch, "r": even[0], "unmerged_milliseconds": 1000 * unmerged}
        for kind, plan in (("constant", even), ("tuned", tuned)):
            timing = timings["/".join(map(str, plan)) if any(plan) else tune.probes.UNMERGED]
            values = torch.tensor(found["tests"][str(list(plan))], dtype=torch.float64)
            row[kind] = {
                "plan": list(plan),
                "milliseconds": 1000 * timing.seconds,
                "speedup": dataclasses.asdict(timing.speedup),
                "kl": values.mean().item(),
                "kl_tuning_images": found["own"][str(list(plan))],
            }
        difference = torch.tensor(found["tests"][str(list(tuned))], dtype=torch.float64) - torch.tensor(
            found["tests"][str(list(even))], dtype=torch.float64
        )
        half = 1.96 * (difference.std() / len(difference) ** 0.5).item()
        row["images"] = len(difference)
        row["kl_difference"] = difference.mean().item()
        row["kl_interval"] = [row["kl_difference"] - half, row["kl_difference"] + half]
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
