"""Merging together with lower precision and other engines: what each costs in accuracy and gains in speed, and both.

For every precision and engine, the unmerged and the merged DeiT-T (shipped adapter) run on the same photographs. Drift
is the KL divergence from the same model in float32. For PyTorch, `groups_changed` is the share of images whose final
token groups differ from float32's, and the drift is given apart for images with the same groups. Speed-ups are over the
unmerged float32 model in PyTorch, interleaved. Needs torchao and nncf.

python -m benchmarks.composition --data imagenet/val --weights deit_tiny.safetensors
"""

import argparse
import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtem
from benchmarks import common
from dtem.exporters import onnx as onnx_files
from dtem.exporters import openvino as openvino_files
from dtem.measure import throughput

MODEL = "deit_tiny_patch16_224"
Forward = Callable[[Tensor], Tensor]


def torchao(model: nn.Module, name: str) -> nn.Module:
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, name)())
    return model


def dynamic_int8(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def float_embeddings(model: nn.Module) -> nn.Module:
    """Similarities from float32 embeddings of the tokens, which stay as they are."""
    method = model.dtem.method.float()
    for embedding in getattr(method, "embeddings", ()):
        embedding.register_forward_pre_hook(lambda module, inputs: tuple(part.float() for part in inputs))
    return model


EAGER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "bfloat16, embeddings in float32": lambda model: float_embeddings(model.to(torch.bfloat16)),
    "float16": lambda model: model.half(),
    "int8 weight-only (torchao)": lambda model: torchao(model, "Int8WeightOnlyConfig"),
    "int8 dynamic (torchao)": lambda model: torchao(model, "Int8DynamicActivationInt8WeightConfig"),
    "int8 dynamic (torch.ao)": dynamic_int8,
}


def eager(handle: dtem.Handle, precision: str) -> tuple[Forward, nn.Module]:
    """The model of `handle` in that precision, as a function of float32 images."""
    model = EAGER[precision](copy.deepcopy(handle.model))
    dtype = getattr(torch, precision.partition(",")[0], torch.float32)
    return lambda images: model(images.to(dtype)).float(), model


def onnx(handle: dtem.Handle, folder: Path, int8: bool, images: list[Tensor]) -> Forward:
    path = folder / f"r{handle.plan[0]}{'_int8' * int8}.onnx"
    dtem.export(handle, path, int8=int8, data=images)
    return onnx_files.runner(path, torch.get_num_threads())


def openvino(handle: dtem.Handle, folder: Path, int8: bool, images: list[Tensor]) -> Forward:
    path = folder / f"r{handle.plan[0]}{'_int8' * int8}.xml"
    dtem.export(handle, path, data=images)
    if int8:
        import nncf
        from openvino import Core, save_model

        calibration = nncf.Dataset([batch.numpy() for batch in images])
        model_type = nncf.ModelType.TRANSFORMER
        quantised = nncf.quantize(Core().read_model(path), calibration, model_type=model_type, subset_size=len(images))
        path = path.with_name("quantised_" + path.name)
        save_model(quantised, path, compress_to_fp16=False)
    return openvino_files.runner(path)


@torch.inference_mode()
def predictions(forward: Forward, batches: list[tuple[Tensor, Tensor]], model: nn.Module | None) -> dict[str, Tensor]:
    """Log-probabilities of all images and, of a model that merges in PyTorch, the token that holds each patch."""
    log_probabilities, sources = [], []
    patched = model is not None and hasattr(model, "dtem") and model.dtem.active
    for images, _ in batches:
        if patched:
            with dtem.Handle(model).trace() as trace:
                logits = forward(images)
            sources.append(trace.sources[-1])
        else:
            logits = forward(images)
        log_probabilities.append(logits.log_softmax(dim=-1))
    result = {"log_probabilities": torch.cat(log_probabilities)}
    return result | ({"sources": torch.cat(sources)} if sources else {})


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL of `other` from `exact`, image by image."""
    return (exact.exp() * (exact - other)).sum(dim=-1)


def measure(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    unmerged = dtem.create_model(MODEL, weights=args.weights)
    loader = common.open_images(unmerged, args.data, limit=args.limit)
    batches = [(batch.images, batch.labels) for batch in loader.epoch(0)]
    labels = torch.cat([labels for _, labels in batches])
    calibration = list(batches[0][0][:32].split(1))
    timed = batches[0][0][: args.batch_size]
    handles = {
        "0": dtem.patch(copy.deepcopy(unmerged), "tome"),
        args.r: dtem.from_pretrained(MODEL, unmerged, r=int(args.r)),
    }
    forwards: dict[tuple[str, str, str], tuple[Forward, nn.Module | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for r, handle in handles.items():
            for precision in EAGER:
                if r != "0" or "embeddings" not in precision:
                    forwards["PyTorch", precision, r] = eager(handle, precision)
            for name, build in (("onnxruntime", onnx), ("OpenVINO", openvino)):
                for int8 in (False, True):
                    key = name, "int8" if int8 else "float32", r
                    print("building", *key, flush=True)
                    forwards[key] = build(handle, Path(folder), int8, calibration), None
        rows, exact = [], {}
        for (engine, precision, r), (forward, model) in forwards.items():
            predicted = predictions(forward, batches, model)
            exact.setdefault(r, predicted)
            drift = divergence(exact[r]["log_probabilities"], predicted["log_probabilities"])
            row: dict[str, Any] = {
                "engine": engine,
                "precision": precision,
                "r": int(r),
                "images": len(labels),
                "top1": 100 * (predicted["log_probabilities"].argmax(dim=1) == labels).double().mean().item(),
                "cross_entropy": F.nll_loss(predicted["log_probabilities"], labels).item(),
                "drift": drift.mean().item(),
            }
            if "sources" in predicted:
                same = (predicted["sources"] == exact[r]["sources"]).all(dim=1)
                row["groups_changed"] = 1 - same.double().mean().item()
                row["drift_same_groups"] = drift[same].mean().item() if same.any() else None
            rows.append(row)
            print(row, flush=True)
        timings = throughput.compare(
            {" ".join(key): forward for key, (forward, _) in forwards.items()}, timed, args.rounds, rest=0.05
        )
    for row, timing in zip(rows, timings.values(), strict=True):
        spread = timing.speedup
        row["batch_size"] = len(timed)
        row["speedup"] = {"median": spread.median, "low": spread.low, "high": spread.high}
    common.save_record("composition", rows, args)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    parser.add_argument("--data", required=True, help="labelled photographs: one folder per class")
    parser.add_argument("--weights", help="weights of DeiT-T; default: downloaded")
    parser.add_argument("--r", default="16")
    parser.add_argument("--limit", type=int, help="number of photographs; default: all")
    parser.add_argument("--batch-size", type=int, default=16, help="of the timing")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    return common.run(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
