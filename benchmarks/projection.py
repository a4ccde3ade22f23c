"""Embedding and qkv as one product against two, inside the merged model. Both read the same weights.

python benchmarks/projection.py
"""

import argparse
import copy
import dataclasses

import common
import timm
import torch

import dtem
from dtem.adapters import fuse
from dtem.measure import throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for name in ("deit_tiny_patch16_224", "deit_small_patch16_224"):
        one = timm.create_model(name).eval()
        handle = dtem.patch(one, r=13)
        two = copy.deepcopy(one)
        for block in two.blocks:
            fuse.separate(block.attn.qkv)
        for batch in (1, 32):
            images = torch.randn(batch, *handle.host.image)
            rounds = args.rounds * (5 if batch == 1 else 1)
            timing = throughput.compare({"two products": two, "one product": one}, images, rounds)
            gain = dataclasses.asdict(timing["one product"].speedup)
            rows.append({"model": name, "batch": batch, "r": 13, "one_over_two": gain})
            print(f"{name} batch {batch:2}: one product is {common.show(gain)} × two", flush=True)
    common.keep("projection", rows, args)


if __name__ == "__main__":
    main()
