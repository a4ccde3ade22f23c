"""The .onnx file: opset 18, standard operators only, a dynamic batch, weights inside."""

import importlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from dtem.export import folding, operators
from dtem.export.program import Runner, quietly
from dtem.types import DtemError

INPUT, OUTPUT = "images", "logits"
MOST = 1 << 40
"""Bytes of a constant that may be computed when the file is written: all are."""


def save(program: ExportedProgram, path: Path, metadata: Mapping[str, str], *, fold: bool = False) -> None:
    """Write `program` as an ONNX file that carries `metadata`; `fold`: with biases as parts of weights (`folding`)."""
    onnx = library("onnx")
    optimizer = library("onnxscript.optimizer")
    try:
        with quietly(), torch.no_grad():
            exported: Any = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=operators.OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                custom_translation_table=operators.table(),
                verbose=False,
            )
            # Parts of a weight become weights of their own, which can be quantised.
            optimizer.fold_constants(exported.model, input_size_limit=MOST, output_size_limit=MOST)
    except Exception as error:  # the exporter wraps whatever went wrong into errors of its own
        raise DtemError(f"this model cannot be written in ONNX: {_reason(error)}. Try another method") from error
    model = exported.model_proto
    if fold:
        folding.fold(model)
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name = "dtem"
    try:
        onnx.checker.check_model(model)
        onnx.save(model, path)
    except ValueError as error:  # protobuf holds 2 GB
        raise DtemError(f"this model cannot be held by one ONNX file: {_reason(error)}. Try --format torch") from error


def quantise(path: Path, out: Path) -> None:
    """The file with int8 weights, and activations that are quantised as they come (dynamic quantisation)."""
    library("onnxruntime")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = library("onnx").load(str(path))
    del model.graph.value_info[:]  # the exporter leaves shapes of weights that it has since transposed
    ranks = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    by_head = [node.name for node in model.graph.node if node.op_type == "MatMul" and ranks.get(node.input[1], 0) > 2]
    with quietly():
        # onnxruntime has no int8 product by channel for a weight of several matrices: those stay as they are.
        quantize_dynamic(model, out, per_channel=True, weight_type=QuantType.QInt8, nodes_to_exclude=by_head)


def runner(path: Path, threads: int = 0) -> Runner:
    """The file in onnxruntime on the CPU; 0 threads: its own choice."""
    ort = library("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    return run


def metadata(path: Path) -> dict[str, str]:
    """What `save` was given."""
    model = library("onnx").load(str(path), load_external_data=False)
    return {entry.key: entry.value for entry in model.metadata_props}


def used(path: Path) -> dict[str, int]:
    """How often each operator occurs, most frequent first; with its domain where that is not ONNX's own."""
    nodes = library("onnx").load(str(path), load_external_data=False).graph.node
    return dict(Counter(f"{n.domain}:{n.op_type}" if n.domain else n.op_type for n in nodes).most_common())


def library(name: str, extra: str = "export") -> Any:
    """An optional package, or the way to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DtemError(f'exporting needs the package {name}: pip install "dtem[{extra}]"') from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)
