"""Would one product for qkv and embedding be faster than two? Weights side by side in memory against weights apart.

python -m benchmarks.projection
"""

import argparse
import dataclasses

import torch
import torch.nn.functional as F

from benchmarks import common
from dtem.measure import throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for width in (192, 384, 768):
        both, bias = torch.randn(3 * width + 64, width), torch.randn(3 * width + 64)
        qkv, embedding = (both[: 3 * width].clone(), bias[: 3 * width]), (both[3 * width :].clone(), bias[3 * width :])
        for batch in (1, 32):
            x = torch.randn(batch, 165, width)
            timing = throughput.compare(
                {
                    "qkv alone": lambda x, qkv=qkv: F.linear(x, *qkv),
                    "two products": lambda x, qkv=qkv, z=embedding: (F.linear(x, *qkv), F.linear(x, *z)),
                    "one product": lambda x, w=both, b=bias: F.linear(x, w, b),
                },
                x,
                args.rounds,
            )
            milliseconds = {name: 1e3 * outcome.seconds for name, outcome in timing.items()}
            speedups = {name: dataclasses.asdict(outcome.speedup) for name, outcome in timing.items()}
            rows.append({"width": width, "batch": batch, "milliseconds": milliseconds, "over_qkv_alone": speedups})
            print(f"width {width} batch {batch:2}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in milliseconds.items()))
    common.save_record("projection", rows, args)


if __name__ == "__main__":
    main()
