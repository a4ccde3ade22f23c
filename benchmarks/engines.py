"""Merged against unmerged in every engine that models are served with, and both against the drop oracle (the same model
with as many tokens in every block, at fixed positions) in the same engine. Medians of interleaved rounds.

python -m benchmarks.engines                                      DeiT-T and DeiT-S, r = 16, batch 1, 4 and 16
python -m benchmarks.engines --cases onnx:float32,onnx:int8 --r 8,13,16 --add

The record is written after every case, so a run that was cut goes on with `--cases` and `--add`. Each round times the
unmerged float32 model in eager PyTorch, too: what it takes over what a merged model takes is gain of engine and merging
together. Files compute the class token alone in the last block; unmerged ones are the host's own forward.
"""

import argparse
import copy
import dataclasses
import time

import timm
import torch

import dtem
from benchmarks import common
from dtem.evaluation.oracle import as_oracle
from dtem.exporters import engines
from dtem.measure import flops, record, throughput

MODELS = "deit_tiny_patch16_224,deit_small_patch16_224"
CASES = [f"{name}:{each}" for name, all in engines.PRECISIONS.items() for each in all if each != "float16"]
ROUNDS = {1: 31, 4: 15}
"""Timed rounds by batch size; for others 7."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cases", default=",".join(CASES), help="engine:precision, with commas; default: all")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--r", default="16")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; default 31, 15 and 7 at batch 1, 4 and 16")
    parser.add_argument("--add", action="store_true", help="to the record that is there; rows of the same case are new")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [tuple(case.split(":")) for case in args.cases.split(",")]
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        cases = [case for case in cases if case[1] != "bfloat16"]
        print("bfloat16 is left out: this CPU has no instructions for it")
    for engine, precision in cases:
        engines.check_engine(engine, precision)
    path = args.out or common.RESULTS / "engines.json"
    rows = {_case(row): row for row in record.load_record(path).results} if args.add and path.exists() else {}
    rates, batches = (list(map(int, each.split(","))) for each in (args.r, args.batch))
    for name in args.models.split(","):
        for engine, precision in cases:
            start = time.perf_counter()
            for row in measure(name, engine, precision, rates, batches, args.rounds):
                rows[_case(row)] = row
            common.save_record("engines", list(rows.values()), args)
            print(f"{name} {engine} {precision}: {time.perf_counter() - start:.0f} s", flush=True)


def _case(row: dict) -> tuple:
    return row["model"], row["engine"], row["precision"], row["r"], row["batch"]


def measure(name: str, engine: str, precision: str, rates: list[int], batches: list[int], rounds: int) -> list[dict]:
    """A row for each batch size and r."""
    torch.manual_seed(0)
    host = timm.create_model(name).eval()
    handles = {r: dtem.patch(copy.deepcopy(host), r=r) for r in rates}
    image = handles[rates[0]].host.image
    base, macs = flops.count(host, image).macs, {r: flops.count(each.model, image).macs for r, each in handles.items()}
    models = {"unmerged": host}
    for r, handle in handles.items():
        models |= {f"merged {r}": handle.model, f"oracle {r}": as_oracle(handle).model}
    own, rows = {}, []
    for batch in batches:
        if not own or engine == "compile":  # which compiles for one batch size
            own = {each: engines.build(model, engine, precision) for each, model in models.items()}
        forwards = {each: _taking(engines.input_dtype(engine, precision), run) for each, run in own.items()}
        images, count = torch.randn(batch, *image), rounds or ROUNDS.get(batch, 7)
        rest = engines.REST.get(engine, 0.0)
        timing = throughput.compare({"eager": host, **forwards}, images, count, warmup=2, rest=rest)
        for r in rates:
            merged, unmerged = timing[f"merged {r}"], timing["unmerged"]
            row = {
                "model": name,
                "engine": engine,
                "precision": precision,
                "batch": batch,
                "r": r,
                "macs_ratio": base / macs[r],
                "milliseconds": {each: 1000 * timing[each].seconds for each in ("eager", "unmerged")},
                "speedup": dataclasses.asdict(merged.share_of(unmerged)),
                "of_oracle": dataclasses.asdict(merged.share_of(timing[f"oracle {r}"])),
                "over_eager": dataclasses.asdict(merged.speedup),
                "rounds": count,
            }
            row["milliseconds"] |= {each: 1000 * timing[f"{each} {r}"].seconds for each in ("merged", "oracle")}
            row["of_macs_ratio"] = row["speedup"]["median"] / row["macs_ratio"]
            rows.append(row)
            print(
                f"{name} {engine} {precision} batch {batch:2} r {r:2}: {row['milliseconds']['merged']:.1f} ms, "
                f"speed-up {common.spread(row['speedup'])}, of the MACs ratio {row['of_macs_ratio']:.2f}, of the "
                f"oracle {common.spread(row['of_oracle'])}, over eager {common.spread(row['over_eager'])}",
                flush=True,
            )
    return rows


def _taking(dtype: torch.dtype, run: throughput.Forward) -> throughput.Forward:
    """`run` for float32 images, which it takes in `dtype`."""
    return run if dtype == torch.float32 else lambda images: run(images.to(dtype))


if __name__ == "__main__":
    main()
