"""Speed-up of merged ONNX files over unmerged ones in onnxruntime on the CPU. Medians over rounds.

The baseline is the faster of the unmerged model as dtem writes it (timm's own forward) and as torch's exporter alone
writes it, at the same (full) optimisation level of onnxruntime. Two more files tell where the rest goes: one that drops
the first r tokens of each block, so that nothing is embedded, matched or merged; and one that merges nothing but is
written as merged files are (heads turned by products, only the class token in the last block).

In every round each file is timed once: opened alone, run until it is warm, timed several times, and closed. Sessions
that are open together take each other's cores, because their threads go on spinning after a run.

python -m benchmarks.export_speed                                  DeiT-S, r = 13 and 16, batch 1 and 16
python -m benchmarks.export_speed --files onnx --rounds 20         keep the files, to be used again
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import onnxruntime
import timm
import torch

import dtem
from benchmarks import common
from dtem.exporters import onnx
from dtem.measure import flops, throughput
from dtem.methods.base import Method
from dtem.types import Taps, Tokens

OWN, PLAIN, SAME = "r0", "plain", "same"
"""Unmerged: as dtem writes it, as torch's exporter does, and written as merged files are."""


class Dropping(Method):
    """Drops tokens without looking at them."""

    name = "dropping"
    conserves_size = False

    def reduce(self, layer: int, tokens: Tokens, taps: Taps, r: int) -> Tokens:
        prefix = self.host.prefix
        return tokens.replace(x=torch.cat([tokens.x[:, :prefix], tokens.x[:, prefix + r :]], dim=1))


class Idle(Method):
    """Goes through the blocks as methods do, and leaves the tokens as they are."""

    name = "idle"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--cases", default="1x1,1x0,16x0", help="batch x threads, with commas; 0: onnxruntime's own")
    parser.add_argument("--r", default="13,16")
    parser.add_argument("--rounds", type=int, default=0, help="default 7, and 31 at batch 1")
    parser.add_argument("--files", type=Path, help="folder for the files; those that are there are used as they are")
    common.add_arguments(parser)
    args = parser.parse_args()
    rates = list(map(int, args.r.split(",")))
    for method in (Dropping, Idle):
        dtem.register_method(method)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.files or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        macs, image = write(args.model, rates, folder)
        rows = []
        for case in args.cases.split(","):
            batch, threads = map(int, case.split("x"))
            rounds = args.rounds or (31 if batch == 1 else 7)
            seconds = time_all(args.model, folder, rates, torch.randn(batch, *image), threads, rounds)
            over = min((OWN, PLAIN), key=lambda name: statistics.median(seconds[name]))
            for r in rates:
                rows.append(
                    {
                        "model": args.model,
                        "batch": batch,
                        "threads": threads or torch.get_num_threads(),
                        "r": r,
                        "over": over,
                        "rounds": rounds,
                        "onnxruntime": onnxruntime.__version__,
                        **compared(seconds, macs, over, r),
                    }
                )
                print(
                    "batch {batch:2}, {threads} threads, r {r}: MACs ratio {macs_ratio:.2f}, of it {of_macs_ratio:.3f} "
                    "({dropping_of_macs_ratio:.3f} by dropping, {same_of_macs_ratio:.3f} of the same writing)".format(
                        **rows[-1]
                    ),
                    flush=True,
                )
    common.save_record("export_speed", rows, args)


def time_all(
    model: str, folder: Path, rates: list[int], images: torch.Tensor, threads: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of one run of every file, by round."""
    names = [OWN, PLAIN, SAME, *(f"{kind}{r}" for r in rates for kind in ("r", "drop"))]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order if turn % 2 == 0 else reversed(order):
            run = onnx.runner(folder / f"{model}-{name}.onnx", threads)
            seconds[name].append(time_one(run, images, 10 if len(images) == 1 else 2))
            del run
    return seconds


def time_one(run: onnx.Runner, images: torch.Tensor, times: int) -> float:
    seconds = []
    for turn in range(times + 1 + (times > 2)):
        start = time.perf_counter()
        run(images)
        seconds.append(time.perf_counter() - start)
        if turn == 0:
            seconds.clear()
    return statistics.median(seconds[-times:])


def compared(seconds: dict[str, list[float]], macs: dict[str, int], over: str, r: int) -> dict:
    """Of the MACs ratio, what merging by r has of it in time."""
    own = f"r{r}"
    ratio, same_ratio = macs[OWN] / macs[own], macs[SAME] / macs[f"short {r}"]
    speedup = spread(seconds[over], seconds[own])
    return {
        "macs_ratio": ratio,
        "speedup": dataclasses.asdict(speedup),
        "of_macs_ratio": speedup.median / ratio,
        "dropping_of_macs_ratio": spread(seconds[over], seconds[f"drop{r}"]).median / ratio,
        "same_macs_ratio": same_ratio,
        "same_of_macs_ratio": spread(seconds[SAME], seconds[own]).median / same_ratio,
        "milliseconds": 1000 * statistics.median(seconds[own]),
        "unmerged_milliseconds": 1000 * statistics.median(seconds[over]),
        "same_milliseconds": 1000 * statistics.median(seconds[SAME]),
    }


def spread(base: list[float], own: list[float]) -> throughput.Spread:
    return throughput.spread([a / b for a, b in zip(base, own, strict=True)])


def write(name: str, rates: list[int], folder: Path) -> tuple[dict[str, int], tuple[int, int, int]]:
    """The files that are not there yet; MACs by file (of merged ones as the paper counts, and "short": as they are
    written, with the class token alone in the last block), and the size of an image."""
    torch.manual_seed(0)
    host = timm.create_model(name).eval()
    handle = dtem.patch(host)
    image = handle.host.image
    checked = [torch.randn(2, *image)]
    macs = {}
    for r in [0, *rates]:
        handle.r, handle.merger.shortcut = r, False
        macs[f"r{r}"] = flops.count(host, image).macs
        write_once(handle, folder / f"{name}-r{r}.onnx", checked)
        handle.merger.shortcut = True
        macs[f"short {r}"] = flops.count(host, image).macs
    handle.unpatch()
    for method, r, stem in [*(("dropping", r, f"drop{r}") for r in rates), ("idle", 1, SAME)]:
        handle = dtem.patch(host, method, r, shortcut=True)
        macs[stem] = flops.count(host, image).macs
        write_once(handle, folder / f"{name}-{stem}.onnx", checked)
        handle.unpatch()
    plain = folder / f"{name}-{PLAIN}.onnx"
    if not plain.exists():
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        names = {"input_names": [onnx.INPUT], "output_names": [onnx.OUTPUT]}
        torch.onnx.export(host, (checked[0],), plain, dynamo=True, dynamic_shapes=shapes, external_data=False, **names)
    return macs, image


def write_once(handle: dtem.Handle, path: Path, checked: list[torch.Tensor]) -> None:
    if not path.exists():
        written = dtem.export(handle, path, data=checked)
        print(f"{path.name}: largest difference {written.agreement.largest:.2g}", flush=True)


if __name__ == "__main__":
    main()
