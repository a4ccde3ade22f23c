"""How log sizes enter fused attention: as a mask or as one more channel, at inference and in training; and what filling
up the CPU kernel's query blocks gains.

    python -m benchmarks.attention
"""

import argparse
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import common
from dtem import ops
from dtem.measure import throughput


def mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None, :])


def channel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ops.attention.attend_by_channel(q, k, v, bias, q.shape[-1] ** -0.5)


def filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ops.attend(q, k, v, bias, q.shape[-1] ** -0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=15)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch in (1, 32):
        for tokens in (197, 189, 165, 149, 141, 133, 101, 69):
            qkv = torch.randn(3, batch, tokens, args.heads, 64).transpose(2, 3)
            bias = (torch.rand(batch, tokens) * 3 + 1).log()
            for training in (False, True):
                ways = {"mask": mask, "channel": channel} | ({} if training else {"as dtem": filled})
                variants = {name: _run(way, qkv, bias, training) for name, way in ways.items()}
                timing = throughput.compare(variants, qkv, args.rounds)
                for name, outcome in timing.items():
                    rows.append(
                        {
                            "batch": batch,
                            "tokens": tokens,
                            "training": training,
                            "way": name,
                            "milliseconds": 1e3 * outcome.seconds,
                            "speedup_over_mask": dataclasses.asdict(outcome.speedup),
                        }
                    )
                what = "forward + backward" if training else "forward"
                print(f"batch {batch:2} tokens {tokens} {what:18}:", end=" ")
                shown = {name: common.spread(dataclasses.asdict(outcome.speedup)) for name, outcome in timing.items()}
                print(", ".join(f"{n} {1e3 * timing[n].seconds:.2f} ms ({shown[n]})" for n in timing), flush=True)
    common.save_record("attention", rows, args)


def _run(way: Callable[..., Tensor], qkv: Tensor, bias: Tensor, training: bool) -> Callable[[Tensor], object]:
    inputs = [tensor.detach().requires_grad_(training) for tensor in (*qkv, bias)]

    def run(_: Tensor) -> object:
        if not training:
            return way(*inputs)
        with torch.inference_mode(False), torch.enable_grad():
            return torch.autograd.grad(way(*inputs).sum(), inputs)

    return run


if __name__ == "__main__":
    main()
