"""Where the time of the unmerged and of the merged model goes, by operation, profiled in turns.

python benchmarks/operations.py        DeiT-T, batch 16, r = 8
"""

import argparse
import copy
from collections import Counter

import common
import timm
import torch

import dtem

GROUPS = {
    "linear layers": ("aten::addmm", "aten::addmm_", "aten::mm", "aten::copy_"),
    "fused attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "GELU": ("aten::gelu", "aten::gelu_"),
    "LayerNorm": ("aten::native_layer_norm",),
    "patch embedding": ("aten::mkldnn_convolution",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    common.add_arguments(parser)
    args = parser.parse_args()
    host = timm.create_model(args.model).eval()
    merged = copy.deepcopy(host)
    images = torch.randn(args.batch, *dtem.patch(merged, r=args.r).host.image)
    models = {"unmerged": host, "merged": merged}
    spent = {name: Counter() for name in models}
    with torch.inference_mode():
        for turn in range(args.rounds + 2):
            for name, model in models.items():
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                    model(images)
                if turn >= 2:
                    for event in profiler.key_averages():
                        spent[name][event.key] += event.self_cpu_time_total / 1e3 / args.rounds
    rows = []
    named = {operation for operations in GROUPS.values() for operation in operations}
    for group, operations in [*GROUPS.items(), ("all else (merging among it)", ())]:
        chosen = operations or [key for key in spent["unmerged"] | spent["merged"] if key not in named]
        rows.append({"group": group} | {name: sum(spent[name][key] for key in chosen) for name in models})
        print(f"{group:30} {rows[-1]['unmerged']:8.1f} ms {rows[-1]['merged']:8.1f} ms")
    common.keep("operations", rows, args)


if __name__ == "__main__":
    main()
