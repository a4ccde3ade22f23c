"""Engines that models are served with, as functions of images: PyTorch eager, compiled, onnxruntime, OpenVINO."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dtem import integrations
from dtem.errors import DtemError, require
from dtem.exporters import export, onnx, openvino
from dtem.exporters.program import Runner, no_warnings
from dtem.handle import Handle, patch

PRECISIONS = {
    "eager": ("float32", "bfloat16", "float16", "int8"),
    "compile": ("float32", "bfloat16", "float16", "int8"),
    "onnx": ("float32", "int8"),
    "openvino": ("float32", "bfloat16", "int8"),
}
"""Engines, and the precisions of each. int8: weights and activations, of eager PyTorch linear layers only."""
REST = {"onnx": 0.05, "openvino": 0.05}
"""Seconds that an engine's own threads need to rest, so that they do not slow down what is timed next."""
CALIBRATION_IMAGES = 16


def check_engine(engine: str, precision: str = "float32", device: str = "cpu") -> None:
    """Refuse an unknown engine, a precision that it does not have, and a package that is missing."""
    if engine not in PRECISIONS:
        raise DtemError(f"engine = {engine!r} is not known; choose one of: {', '.join(PRECISIONS)}")
    if precision not in PRECISIONS[engine]:
        raise DtemError(
            f"dtype = {precision!r}: engine {engine} has no {precision} here; choose one of: "
            f"{', '.join(PRECISIONS[engine])}"
        )
    if engine in export.PACKAGES:
        if device != "cpu":
            raise DtemError(f"device = {device!r}: engine {engine} runs on the CPU here; use eager or compile")
        extra = "export" if engine == "onnx" else engine
        for package in export.PACKAGES[engine] + (export.INT8_PACKAGES[engine] if precision == "int8" else ()):
            require(package, extra)
    elif precision == "int8":
        if device != "cpu":
            raise DtemError(f"dtype = 'int8' of engine {engine} is for the CPU")
        if engine == "compile":
            require("torchao", "dev")


def input_dtype(engine: str, precision: str) -> torch.dtype:
    """Type of the images that a model in this engine takes: files and int8 models take float32."""
    dtype: torch.dtype = torch.float32
    if engine not in export.PACKAGES and precision != "int8":
        dtype = getattr(torch, precision)
    return dtype


def build(model: nn.Module, engine: str, precision: str = "float32") -> Runner:
    """A model, patched or not, in eval mode, as a function of images (`input_dtype`) in an engine.

    Args:
        model: stays as it was; in float32 on the CPU for files and int8.
        engine: one of `PRECISIONS`.
        precision: one of the engine's.

    Exported files run with torch's present number of threads.
    """
    check_engine(engine, precision)
    if engine in export.PACKAGES:
        return _exported(model, engine, precision)
    if precision == "int8":
        model = _int8(copy.deepcopy(model), engine)
    elif next(model.parameters()).dtype != input_dtype(engine, precision):
        model = copy.deepcopy(model).to(input_dtype(engine, precision))
    forward = integrations.as_logits_fn(model)
    if engine == "compile":
        torch.compiler.reset()  # a graph for one batch size, not one for all that came before
        compiled: Runner = torch.compile(forward, dynamic=False)
        return compiled
    return forward


def _exported(model: nn.Module, engine: str, precision: str) -> Runner:
    if not hasattr(model, "dtem"):
        model = copy.deepcopy(model)
        patch(model, "tome", r=0)  # the host's own forward
    handle = Handle(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(CALIBRATION_IMAGES, *handle.host.image, generator=generator)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model{export.FORMATS[engine]}")
        export.export(handle, path, int8=precision == "int8", data=[images])
        if engine == "onnx":
            return onnx.runner(path, threads)
        return openvino.runner(path, threads, {"bfloat16": "bf16"}.get(precision, "f32"))


def _int8(model: nn.Module, engine: str) -> nn.Module:
    """Linear layers with int8 weights and activations, by the quantiser that is fast in this engine."""
    with no_warnings():
        if engine == "compile":
            from torchao import quantization

            quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
            return model
        quantise: Callable[..., nn.Module] = torch.ao.quantization.quantize_dynamic
        return quantise(model, {nn.Linear}, dtype=torch.qint8)
