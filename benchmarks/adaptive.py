"""The same r for every image against thresholds by which each merges what it can, at equal mean GFLOPs.

python benchmarks/adaptive.py --data DIR --weights FILE [--gflops 0.65,0.81] [--limit 100]

DIR holds train (thresholds are calibrated on 256 of its photographs, without labels) and val (judged on, one image at a
time). Tokens are compared by the keys (ToMe) and by trained embeddings (--adapter, by default those that are shipped;
neither is trained here). For the cost, every image is counted by the tokens that it was really left with.
"""

import argparse
import dataclasses
from pathlib import Path

import common
import timm
import torch
from proof import host

import dtem
from dtem.cli import contenders
from dtem.measure import record
from dtem.tasks.classification import evaluate
from dtem.tasks.classification.data import Loader, eval_transform
from dtem.tasks.classification.outcomes import paired
from dtem.tasks.classification.sources import open_source

CALIBRATED_ON = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--adapter", default="deit_tiny_patch16_224")
    parser.add_argument("--gflops", default="0.65,0.81")
    parser.add_argument("--limit", type=int, help="judge on so many images only")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = timm.data.resolve_data_config(model=timm.create_model(args.model))
    some = evaluate.sample(open_source(str(args.data / "train")), CALIBRATED_ON)
    pixels = torch.cat([batch.images for batch in Loader(some, eval_transform(config), 32).epoch(0)])
    handles = {
        "keys (ToMe)": dtem.patch(host(args), "tome"),
        "embeddings": dtem.from_pretrained(args.adapter, host(args), r=0),
    }
    field = {}
    for metric, handle in handles.items():
        handle.model.eval()
        for gflops in map(float, args.gflops.split(",")):
            for kind in ("constant", "adaptive"):
                if kind == "adaptive":
                    handle.calibrate(pixels, f"{gflops}G")
                    print(f"{metric}, {gflops} GFLOPs: {handle.merger.schedule}", flush=True)
                spec = str(handle.merger.adaptive) if kind == "adaptive" else f"{gflops}G"
                field[metric, gflops, kind] = contenders.merged(metric, handle, [spec])[0]
    forwards = {str(key): one.forward for key, one in field.items()}
    loader = Loader(open_source(str(args.data / "val")), eval_transform(config), 1)
    with evaluate.evaluating(*(handle.model for handle in handles.values())):
        outcomes = evaluate.compete(forwards, loader, limit=args.limit)
    rows = []
    for (metric, gflops, kind), one in field.items():
        done, own = contenders.settled(one), outcomes[str((metric, gflops, kind))]
        base = outcomes[str((metric, gflops, "constant"))]
        rows.append(
            {
                "metric": metric,
                "gflops": gflops,
                "kind": kind,
                "r": one.r,
                "images": len(own),
                "macs": done.macs,
                "macs_quartiles": done.spread,
                "tokens": done.tokens,
                "top1": own.top1,
                "cross_entropy": own.mean_loss,
                "images_per_second": one.forward.images_per_second,
                "against_constant": None if own is base else dataclasses.asdict(paired(base, own)),
            }
        )
    data = {name: record.data_hash(args.data / name) for name in ("train", "val")}
    path = args.out or common.RESULTS / "adaptive.json"
    record.save(record.collect("adaptive", rows, seed=0, data=str(data)), path)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
