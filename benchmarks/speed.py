"""Speed-up of the merged model over the unmerged one, and over ToMe as published. Medians of interleaved rounds.

python -m benchmarks.speed                    DeiT-T and DeiT-S, batch 1, 16 and 32, r = 8, 13, 16
python -m benchmarks.speed --batch 1 --rounds 60
"""

import argparse
import copy
import dataclasses

import timm
import torch

import dtem
from benchmarks import common
from benchmarks.plain_tome import plain_tome
from dtem.measure import flops, throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="deit_tiny_patch16_224,deit_small_patch16_224")
    parser.add_argument("--batch", default="1,16,32")
    parser.add_argument("--r", default="8,13,16")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; default 12, and 60 at batch 1")
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        host = timm.create_model(name).eval()
        ours = copy.deepcopy(host)
        handle = dtem.patch(ours)
        base = flops.count(host, handle.host.image).macs
        for batch in map(int, args.batch.split(",")):
            images = torch.randn(batch, *handle.host.image)
            for r in map(int, args.r.split(",")):
                handle.r = r
                variants = {"unmerged": host, "dtem": ours, "plain_tome": plain_tome(host, r)}
                rounds = args.rounds or (60 if batch == 1 else 12)
                timing = throughput.compare(variants, images, rounds, warmup=2)
                against_plain = throughput.compare({k: variants[k] for k in ("plain_tome", "dtem")}, images, rounds)
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "r": r,
                        "macs_ratio": base / flops.count(ours, handle.host.image).macs,
                        "speedup": dataclasses.asdict(timing["dtem"].speedup),
                        "plain_tome_speedup": dataclasses.asdict(timing["plain_tome"].speedup),
                        "over_plain_tome": dataclasses.asdict(against_plain["dtem"].speedup),
                        "rounds": rounds,
                    }
                )
                last = rows[-1]
                print(
                    f"{name} batch {batch:2} r {r:2}: MACs ratio {last['macs_ratio']:.2f}, speed-up "
                    f"{common.spread(last['speedup'])}, over plain ToMe {common.spread(last['over_plain_tome'])}",
                    flush=True,
                )
    common.save_record("speed", rows, args)


if __name__ == "__main__":
    main()
