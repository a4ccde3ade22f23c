"""Where the time of the unmerged model, of the merged one and of plain ToMe goes, by operation, profiled in turns.

python -m benchmarks.operations                                                      DeiT-T, DeiT-S, batch 1 and 16
python -m benchmarks.operations --cases deit_small_patch16_224:32:13                 model, batch and r
"""

import argparse
import copy
from collections import Counter

import timm
import torch

import dtem
from benchmarks import common
from benchmarks.plain_tome import plain_tome

CASES = "deit_tiny_patch16_224:1:8,deit_tiny_patch16_224:16:8,deit_small_patch16_224:16:8,deit_small_patch16_224:16:16"
GROUPS = {
    "linear layers": ("aten::addmm", "aten::addmm_", "aten::mm", "aten::copy_", "mkldnn::_linear_pointwise"),
    "attention and similarities": (
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
    ),
    "GELU": ("aten::gelu", "aten::gelu_"),
    "LayerNorm": ("aten::native_layer_norm",),
    "patch embedding": ("aten::mkldnn_convolution",),
}
REST = "all else (merging among it)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rounds", type=int, default=12)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case in args.cases.split(","):
        name, batch, r = case.split(":")
        rounds = args.rounds * (10 if batch == "1" else 1)
        rows += profiled(name, int(batch), int(r), rounds)
    common.save_record("operations", rows, args)


def profiled(name: str, batch: int, r: int, rounds: int) -> list[dict]:
    """Milliseconds of one forward, by group of operations."""
    host = timm.create_model(name).eval()
    merged = copy.deepcopy(host)
    images = torch.randn(batch, *dtem.patch(merged, r=r).host.image)
    models = {"unmerged": host, "merged": merged, "plain_tome": plain_tome(host, r)}
    spent = {label: Counter() for label in models}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for label, model in models.items():
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                    model(images)
                if turn >= 2:
                    for event in profiler.key_averages():
                        spent[label][event.key] += event.self_cpu_time_total / 1e3 / rounds
    rows = []
    named = {operation for operations in GROUPS.values() for operation in operations}
    seen = set().union(*spent.values())
    for group, operations in [*GROUPS.items(), (REST, ())]:
        chosen = operations or [key for key in seen if key not in named]
        times = {label: sum(spent[label][key] for key in chosen) for label in models}
        rows.append({"model": name, "batch": batch, "r": r, "group": group, **times})
        print(f"{name} r={r} {group:30} " + " ".join(f"{label} {value:7.1f} ms" for label, value in times.items()))
    return rows


if __name__ == "__main__":
    main()
