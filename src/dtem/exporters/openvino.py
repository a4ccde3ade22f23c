"""The OpenVINO file: an .xml with the graph and a .bin with the weights beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dtem.errors import require
from dtem.exporters.program import Runner, no_warnings

CALIBRATION_IMAGES = 128
"""Images that the range of every activation is taken from, at most."""


def save(source: Path, path: Path, metadata: Mapping[str, str]) -> None:
    """Convert the ONNX file `source`; `path` ends in .xml, the weights stay float32."""
    openvino = require("openvino", "openvino")
    model = openvino.convert_model(source)
    for key, value in metadata.items():
        model.set_rt_info(value, ["dtem", key])
    openvino.save_model(model, path, compress_to_fp16=False)


def quantise(path: Path, batches: Sequence[Tensor]) -> None:
    """Weights and activations to int8 in place, by the range of the activations on some images."""
    openvino = require("openvino", "openvino")
    nncf = require("nncf", "openvino")
    images = [image[None].numpy() for batch in batches for image in batch][:CALIBRATION_IMAGES]
    model = openvino.Core().read_model(path)
    with no_warnings():
        quantised = nncf.quantize(
            model, nncf.Dataset(images), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(images)
        )
    metadata = model.get_rt_info(["dtem"]).astype(dict)
    for key, value in metadata.items():
        quantised.set_rt_info(str(value.astype(str)), ["dtem", key])
    del model  # it reads from the file that is replaced
    draft = path.with_name(f"int8-{path.name}")
    openvino.save_model(quantised, draft, compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        draft.with_suffix(suffix).replace(path.with_suffix(suffix))


def runner(path: Path, threads: int = 0, precision: str = "f32") -> Runner:
    """The file in OpenVINO on the CPU; 0 threads: its own choice.

    By default in float32 throughout; `precision` "bf16" is what OpenVINO would use by itself where the CPU has it.
    """
    openvino = require("openvino", "openvino")
    hints = {"INFERENCE_PRECISION_HINT": precision} | ({"INFERENCE_NUM_THREADS": threads} if threads else {})
    compiled = openvino.Core().compile_model(path, "CPU", hints)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(compiled(images.numpy())[0].copy())

    return run
