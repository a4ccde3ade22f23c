"""The .onnx file: opset 18, standard operators only, a dynamic batch, weights inside."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from dtem.errors import DtemError, first_line, require
from dtem.exporters import folding, operators
from dtem.exporters.program import Runner, no_warnings

INPUT, OUTPUT = "images", "logits"
SIZE_LIMIT = 1 << 40
"""Constants up to this many bytes are computed when the file is written: all of them."""


def save(program: ExportedProgram, path: Path, metadata: Mapping[str, str], *, fold: bool = False) -> None:
    """Write `program` as an ONNX file with `metadata`; `fold`: with norms and biases folded into weights."""
    onnx = require("onnx", "export")
    optimizer = require("onnxscript.optimizer", "export")
    try:
        with no_warnings(), torch.no_grad():
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
            optimizer.fold_constants(exported.model, input_size_limit=SIZE_LIMIT, output_size_limit=SIZE_LIMIT)
    except Exception as error:  # the exporter wraps whatever went wrong into errors of its own
        raise DtemError(f"this model cannot be written in ONNX: {_reason(error)}. Try another method") from error
    if fold:
        folding.fold(exported.model)
    model = exported.model_proto
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name = "dtem"
    try:
        onnx.checker.check_model(model)
        onnx.save(model, path)
    except ValueError as error:  # protobuf holds 2 GB
        raise DtemError(
            f"this model does not fit into one ONNX file: {_reason(error)}. Try format = 'torch'"
        ) from error


def quantise(path: Path, out: Path) -> None:
    """Dynamic quantisation: int8 weights, activations quantised at run time."""
    require("onnxruntime", "export")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = require("onnx", "export").load(str(path))
    del model.graph.value_info[:]  # the exporter leaves shapes of weights that it has since transposed
    ranks = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    batched = [node.name for node in model.graph.node if node.op_type == "MatMul" and ranks.get(node.input[1], 0) > 2]
    with no_warnings():
        # onnxruntime has no per-channel int8 product for a weight of several matrices: those stay in float32.
        quantize_dynamic(model, out, per_channel=True, weight_type=QuantType.QInt8, nodes_to_exclude=batched)


def runner(path: Path, threads: int = 0) -> Runner:
    """The file in onnxruntime on the CPU; 0 threads: its own choice."""
    ort = require("onnxruntime", "export")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    return run


def operator_counts(path: Path) -> dict[str, int]:
    """How often each operator occurs, most frequent first; with its domain where that is not ONNX's own."""
    nodes = require("onnx", "export").load(str(path), load_external_data=False).graph.node
    return dict(Counter(f"{n.domain}:{n.op_type}" if n.domain else n.op_type for n in nodes).most_common())


def _reason(error: BaseException) -> str:
    """The first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
