"""Where the time of the unmerged model, plain ToMe, the merged model and the drop oracle goes, by operation, in turns.

python -m benchmarks.operations                                          DeiT-T, DeiT-S, batch 1 and 16; long inputs
python -m benchmarks.operations --cases deit_small_patch16_224:32:13,deit_small_patch16_224:1:84:512 --threads 1

A case is model, batch, r, and the side of the images where it is not 224 (then without plain ToMe). Medians of rounds.
What merged linear layers take beyond those of the oracle is the embedding; in attention, log sizes.
"""

import argparse
import contextlib
import copy
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from unittest import mock

import timm
import torch

import dtem
from benchmarks import common
from benchmarks.plain_tome import plain_tome
from dtem.evaluation.oracle import as_oracle
from dtem.ops import kernel

CASES = (
    "deit_tiny_patch16_224:1:8,deit_tiny_patch16_224:16:8,deit_small_patch16_224:16:8,deit_small_patch16_224:16:16,"
    "deit_small_patch16_224:1:84:512,deit_small_patch16_224:1:188:768,deit_small_patch16_224:1:334:1024"
)
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
    "matching and merging": ("kernel", "aten::index_select", "aten::index_add_", "aten::log"),
}
REST = "all else"
CPU = torch.profiler.ProfilerActivity.CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--rounds", type=int, default=12)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case in args.cases.split(","):
        name, batch, r, *size = case.split(":")
        rounds = args.rounds * (10 if batch == "1" and not size else 1)
        rows += profiled(name, int(batch), int(r), rounds, *map(int, size))
    common.save_record("operations", rows, args)


def profiled(name: str, batch: int, r: int, rounds: int, size: int = 224) -> list[dict]:
    """Milliseconds of one forward, by group of operations."""
    torch.manual_seed(0)
    host = timm.create_model(name, img_size=size).eval()
    handle = dtem.patch(copy.deepcopy(host), r=r)
    images = torch.randn(batch, *handle.host.image)
    models = {"unmerged": host, "merged": handle.model, "oracle": as_oracle(handle).model}
    if size == 224:
        models["plain_tome"] = plain_tome(host, r)
    spent = {label: defaultdict(list) for label in models}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for label, model in models.items():
                with kernel_time() as seconds, torch.profiler.profile(activities=[CPU]) as profiler:
                    model(images)
                if turn >= 2:
                    now = Counter({event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()})
                    now["kernel"] = 1e3 * sum(seconds)
                    for group, milliseconds in by_group(now).items():
                        spent[label][group].append(milliseconds)
    rows = []
    for group in [*GROUPS, REST]:
        times = {label: statistics.median(spent[label][group]) for label in models}
        rows.append({"model": name, "image": size, "batch": batch, "r": r, "group": group, **times})
        print(f"{name} r={r} {group:30} " + " ".join(f"{label} {value:7.2f} ms" for label, value in times.items()))
    return rows


def by_group(spent: Counter) -> dict[str, float]:
    """Sums of times by operation."""
    times = {group: sum(spent.pop(key, 0.0) for key in operations) for group, operations in GROUPS.items()}
    return {**times, REST: spent.total()}


@contextlib.contextmanager
def kernel_time() -> Iterator[list[float]]:
    """Seconds of every call of the compiled kernel, which the profiler does not see."""
    seconds, run = [], kernel.match_and_merge

    def timed(*args: object) -> tuple:
        start = time.perf_counter()
        out = run(*args)
        seconds.append(time.perf_counter() - start)
        return out

    with mock.patch.object(kernel, "match_and_merge", timed):
        yield seconds


if __name__ == "__main__":
    main()
