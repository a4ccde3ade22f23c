"""`dtem demo` with several seeds: accuracy and speed, for docs/see.md, and the packaged adapter of digits_vit.

    python -m benchmarks.demo --seeds 0,1
    python -m benchmarks.demo --seeds 0 --assets src/dtem/models/assets

With --assets also digits_vit.dtem.safetensors, the adapter of the first seed, and digits_vit.record.json, its accuracy
and ToMe's at every r, which `dtem app` plots. A number of updates instead of a time: the same on every machine.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import dtem
from benchmarks import common
from dtem.measure import record
from dtem.models import digits_vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--r", help="default: that of the demo")
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "demo.json")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            report = dtem.demo(updates=args.updates, r=args.r, seed=seed, out=Path(folder) / "demo.html")
        print(report, flush=True)
        document = report.to_dict()
        row: dict[str, Any] = {"seed": seed, "updates": report.training.updates}
        row |= {name: document[name] for name in ("headline", "focus", "verdicts")}
        row |= {name: document["evaluation"][name] for name in ("rows", "against_tome")}
        kept = record.load_record(args.out).results if args.out.exists() else []
        rows = sorted([row, *(each for each in kept if each["seed"] != seed)], key=lambda each: each["seed"])
        record.save(record.collect("demo", rows, seed=seed), args.out)
        if args.assets is not None and seed == seeds[0]:
            trained = report.training
            path = args.assets / f"{digits_vit.NAME}.dtem.safetensors"
            dtem.save_pretrained(trained.handle, path, trained_r=trained.config.r)
            measured = record.collect("eval", report.evaluation.to_dict() | {"updates": trained.updates}, seed=seed)
            record.save(measured, args.assets / f"{digits_vit.NAME}.record.json")


if __name__ == "__main__":
    main()
