"""Cost of a modular training step: forward and backward, against the unmerged frozen model.

python -m benchmarks.training_step        DeiT-T and DeiT-S, batch 16, r = 16

"unmerged" is the frozen host with gradients flowing back to the output of its first block, which is as far as they
flow when its embeddings learn; "soft" is the relaxed, merging model, and "sparse" the one that drops tokens that have
left the merging.
"""

import argparse
import copy
import dataclasses
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

import dtem
from benchmarks import common
from dtem.measure import throughput


def unmerged(host: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            x = host.blocks[0](host.norm_pre(host._pos_embed(host.patch_embed(images))))
        return host.forward_head(host.norm(host.blocks[1:](x.requires_grad_())))

    return forward


def soft(host: nn.Module, r: int, sparse: bool = False) -> nn.Module:
    model = copy.deepcopy(host)
    dtem.patch(model, r=r, sparse=sparse).mode = "soft"
    return model


def step(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    def run(images: Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            forward(images).logsumexp(dim=1).sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="deit_tiny_patch16_224,deit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    common.add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        host = timm.create_model(name).eval().requires_grad_(False)
        variants = {
            "unmerged": step(unmerged(host)),
            "soft": step(soft(host, args.r)),
            "sparse": step(soft(host, args.r, sparse=True)),
        }
        timing = throughput.compare(variants, torch.randn(args.batch, 3, 224, 224), args.rounds)
        for label, timed in timing.items():
            row = {"model": name, "batch": args.batch, "r": args.r, "step": label}
            rows.append(row | {"seconds": timed.seconds, "speedup": dataclasses.asdict(timed.speedup)})
            print(f"{name} {label:9} {timed.seconds:.3f} s, cost {1 / timed.speedup.median:.2f} × unmerged", flush=True)
    common.save_record("training_step", rows, args)


if __name__ == "__main__":
    main()
