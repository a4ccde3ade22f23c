"""Speed-up of the merged model over the unmerged one and ToMe as published, and its share of the drop oracle, which is
the same model with as many tokens in every block at fixed positions. Medians of interleaved rounds.

python -m benchmarks.speed                                          DeiT-T, DeiT-S and DeiT-B, batch 1, 16 and 32
python -m benchmarks.speed --models deit_tiny_patch16_224 --batch 1 --rounds 60 --add
python -m benchmarks.speed --long                                   DeiT-S at 1,025, 2,305 and 4,097 tokens, batch 1

"Same code" is the unmerged model run by the code of merged models, which on some processors has faster linear layers.
"""

import argparse
import copy
import dataclasses

import timm
import torch

import dtem
from benchmarks import common
from benchmarks.plain_tome import plain_tome
from dtem.evaluation.oracle import as_oracle
from dtem.measure import flops, record, throughput

MODELS = "deit_tiny_patch16_224,deit_small_patch16_224,deit_base_patch16_224"
SIZES = "512,768,1024"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"default {MODELS}")
    parser.add_argument("--batch", default="1,16,32")
    parser.add_argument("--r", default="8,13,16", help="at 197 tokens; for larger images in proportion")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; default 8, and 60 at batch 1")
    parser.add_argument("--long", action="store_true", help="large images, one at a time")
    parser.add_argument("--sizes", default=SIZES, help="with --long: sides of the images; default %(default)s")
    parser.add_argument("--add", action="store_true", help="to the record that is there; rows of the same case are new")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = args.models or ("deit_small_patch16_224" if args.long else MODELS)
    name = "long_inputs" if args.long else "speed"
    path = args.out or common.RESULTS / f"{name}.json"
    rows = {_case(row): row for row in record.load_record(path).results} if args.add and path.exists() else {}
    sizes = map(int, args.sizes.split(",")) if args.long else [224]
    batches = [1] if args.long else list(map(int, args.batch.split(",")))
    for size in sizes:
        for model in models.split(","):
            for row in measure(model, size, batches, list(map(int, args.r.split(","))), args.rounds, args.long):
                rows[_case(row)] = row
    common.save_record(name, list(rows.values()), args)


def _case(row: dict) -> tuple:
    return row["model"], row["image"], row["batch"], row["r"]


def measure(name: str, size: int, batches: list[int], rates: list[int], rounds: int, memory: bool) -> list[dict]:
    """A row for each batch size and r."""
    torch.manual_seed(0)
    host = timm.create_model(name, img_size=size).eval()
    handle = dtem.patch(copy.deepcopy(host))
    same = same_code(handle)
    base = flops.count(host, handle.host.image).macs
    rows = []
    for batch in batches:
        images = torch.randn(batch, *handle.host.image)
        for rate in rates:
            handle.r = r = round(rate * handle.host.patches / 196)
            variants = {
                "unmerged": host,
                "same": same,
                "dtem": handle.model,
                "oracle": as_oracle(handle).model,
                **({} if memory else {"plain_tome": plain_tome(host, r)}),
            }
            count = rounds or (60 if batch == 1 and size == 224 else 8)
            timing = throughput.compare(variants, images, count, warmup=2)
            merged = timing["dtem"]
            row = {
                "model": name,
                "image": size,
                "tokens": handle.host.patches + handle.host.prefix,
                "batch": batch,
                "r": r,
                "macs_ratio": base / flops.count(handle.model, handle.host.image).macs,
                "milliseconds": {variant: 1000 * each.seconds for variant, each in timing.items()},
                "speedup": dataclasses.asdict(merged.speedup),
                "same_speedup": dataclasses.asdict(timing["same"].speedup),
                "over_same": dataclasses.asdict(merged.share_of(timing["same"])),
                "of_oracle": dataclasses.asdict(merged.share_of(timing["oracle"])),
                "rounds": count,
            }
            if memory:
                row["peak_bytes"] = {
                    each: throughput.peak_bytes(variants[each], images) for each in ("unmerged", "dtem")
                }
            else:
                row["plain_tome_speedup"] = dataclasses.asdict(timing["plain_tome"].speedup)
                row["over_plain_tome"] = dataclasses.asdict(merged.share_of(timing["plain_tome"]))
            rows.append(row)
            print(
                f"{name} {row['tokens']} tokens, batch {batch:2} r {r:3}: MACs ratio {row['macs_ratio']:.2f}, speed-up "
                f"{common.spread(row['speedup'])}, over the same code {common.spread(row['over_same'])}, of the oracle "
                f"{common.spread(row['of_oracle'])}",
                flush=True,
            )
    return rows


def same_code(handle: dtem.Handle) -> torch.nn.Module:
    """The unmerged model, run by the code of merged models."""
    with handle.at(r=0):
        model = as_oracle(handle).model
    model.dtem.active = True
    return model


if __name__ == "__main__":
    main()
