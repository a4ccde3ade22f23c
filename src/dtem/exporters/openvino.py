"""The OpenVINO file: an .xml with the graph and a .bin with the weights beside it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dtem.errors import require
from dtem.exporters.program import Runner


def save(source: Path, path: Path, metadata: Mapping[str, str]) -> None:
    """Convert the ONNX file `source`; `path` ends in .xml, the weights stay float32."""
    openvino = require("openvino", "openvino")
    model = openvino.convert_model(source)
    for key, value in metadata.items():
        model.set_rt_info(value, ["dtem", key])
    openvino.save_model(model, path, compress_to_fp16=False)


def runner(path: Path) -> Runner:
    """The file in OpenVINO on the CPU, in float32 throughout."""
    openvino = require("openvino", "openvino")
    hints = {"INFERENCE_PRECISION_HINT": "f32"}  # by itself it would use bfloat16 where the CPU has it
    compiled = openvino.Core().compile_model(path, "CPU", hints)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(compiled(images.numpy())[0].copy())

    return run
