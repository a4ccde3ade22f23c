"""Speed-up of merging inside a Segmenter's encoder, matching included. Medians of interleaved rounds.

python -m benchmarks.segmentation_speed                          ViT-S encoder, 512×512, batch 1 and 4, r = 0.5
python -m benchmarks.segmentation_speed --sizes 256,512,768,1024 cost against image size, too
python -m benchmarks.segmentation_speed --profile                where the time goes in one forward

--clock cpu takes processor time (all threads together) instead of the time on the wall: for a rough number on a machine
where others are at work.
"""

import argparse
import copy
import dataclasses
import time

import torch
from torch import Tensor

import dtem
from benchmarks import common
from dtem.measure import flops, throughput
from dtem.models import segmenter

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="seg_s_mask_16")
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--r", default="0.5", help="share of patches removed, several with commas")
    parser.add_argument(
        "--sizes", default="512,256,384,640,768,896,1024", help="batches above 1 run at the first alone"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", action="store_true")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    host = segmenter.create(args.model).eval()
    handles = {}
    for method in ("tome", "dtem"):
        handles[method] = dtem.patch(copy.deepcopy(host), method)
    if args.profile:
        profile(handles["dtem"], float(args.r.split(",")[0]), int(args.sizes.split(",")[0]))
        return
    rows = []
    for place, size in enumerate(map(int, args.sizes.split(","))):
        for batch in map(int, args.batch.split(",")):
            if place == 0 or batch == 1:
                rows += measure(args, host, handles, size, batch)
    common.save_record("segmentation_speed", rows, args)


class Encoder(torch.nn.Module):
    """A Segmenter without its decoder."""

    def __init__(self, model: segmenter.Segmenter) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.encode(images)


def measure(args: argparse.Namespace, host: segmenter.Segmenter, handles: dict, size: int, batch: int) -> list[dict]:
    images = torch.randn(batch, 3, size, size)
    rows = []
    for r in map(float, args.r.split(",")):
        encoders = {"unmerged": Encoder(host)}
        for name, handle in handles.items():
            handle.r = r
            encoders[name] = Encoder(handle.model)
        timing = throughput.compare(encoders, images, args.rounds, warmup=2, clock=CLOCKS[args.clock])
        macs = {name: flops.count(encoder, (3, size, size)).macs for name, encoder in encoders.items()}
        for name in handles:
            rows.append(
                {
                    "model": args.model,
                    "method": name,
                    "size": size,
                    "tokens": (size // 16) ** 2 + 1,
                    "batch": batch,
                    "ratio": r,
                    "macs_ratio": macs["unmerged"] / macs[name],
                    "milliseconds": 1000 * timing[name].seconds / batch,
                    "unmerged_milliseconds": 1000 * timing["unmerged"].seconds / batch,
                    "speedup": dataclasses.asdict(timing[name].speedup),
                    "clock": args.clock,
                }
            )
            last = rows[-1]
            print(
                f"{size}² batch {batch} r {r} {name}: {last['unmerged_milliseconds']:.0f} ms → "
                f"{last['milliseconds']:.0f} ms per image, MACs ratio {last['macs_ratio']:.2f}, speed-up "
                f"{common.spread(last['speedup'])}",
                flush=True,
            )
    return rows


def profile(handle: dtem.Handle, r: float, size: int) -> None:
    handle.r = r
    images = torch.randn(1, 3, size, size)
    with torch.inference_mode():
        handle.model.encode(images)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(3):
                handle.model.encode(images)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=40))


if __name__ == "__main__":
    main()
