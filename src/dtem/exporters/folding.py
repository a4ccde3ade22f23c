"""Fold scale, shift and biases around LayerNorm into the linear layers that read it: fewer passes over memory.

A normalised token sums to zero, Σ_i x̂_i = 0. So if the norm returns x̂ + 1 instead of γ x̂ + β, its C numbers sum to C,
and a linear layer can hold everything that is constant in its weights:

    (γ x̂ + β) W + b  =  (x̂ + 1) W'        W'_ij = γ_i W_ij + t_j        C t_j = b_j + Σ_i (β_i − γ_i) W_ij

A rewrite rule of onnxscript matches a fixed pattern, and the number of layers that read a norm varies (q, k, v; through
transposes and reshapes), so this walks onnxscript's graph (onnx_ir) itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]


class Linear(NamedTuple):
    """A product with a weight (c, k), and its bias."""

    node: Any
    weight: Weights
    bias: Weights | float
    output: Any
    """The value behind the bias."""


def fold(model: Any) -> int:
    """Fold in an onnx_ir.Model, in place. Returns the number of norms that changed.

    A norm that anything but linear layers reads stays as it is.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    def constant(name: str, values: Weights) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(values, name=name))
        value.shape, value.dtype = ir.Shape(values.shape), ir.DataType.FLOAT
        model.graph.register_initializer(value)
        return value

    folded = 0
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        scale, shift = _constant(norm.inputs[1]), _constant(norm.inputs[2]) if len(norm.inputs) > 2 else 0.0
        if scale is None or shift is None or scale.ndim != 1:
            continue
        layers = list(_readers(norm.outputs[0], len(scale)))
        if None in layers:
            continue
        ones = constant(f"{norm.outputs[0].name}.ones", np.ones_like(scale))
        norm.resize_inputs(3)
        norm.replace_input_with(1, ones)
        norm.replace_input_with(2, ones)
        for layer in filter(None, layers):
            weight = constant(f"{layer.output.name}.weight", folded_weight(layer.weight, layer.bias, scale, shift))
            product = ir.node("MatMul", [layer.node.inputs[0], weight])
            product.outputs[0].shape, product.outputs[0].type = layer.output.shape, layer.output.type
            model.graph.insert_after(layer.output.producer(), product)
            name, layer.output.name = layer.output.name, None
            product.outputs[0].name = name
            ir.convenience.replace_all_uses_with(layer.output, product.outputs[0], replace_graph_outputs=True)
        folded += 1
    RemoveUnusedNodesPass()(model)
    return folded


def folded_weight(weight: Weights, bias: Weights | float, scale: Weights, shift: Weights | float) -> Weights:
    """W' of the formula above."""
    exact = weight.astype(np.float64)
    constant = bias + (shift - scale.astype(np.float64)) @ exact
    return (scale[:, None] * exact + constant / len(scale)).astype(np.float32)


def _constant(value: Any) -> Any:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _readers(value: Any, width: int) -> Iterator[Linear | None]:
    """The linear layers that read `value`, also behind operators that only move tokens; None for anything else."""
    if value.is_graph_output():
        yield None
    for node, index in value.uses():
        if index == 0 and _moves_tokens(node, width):
            yield from _readers(node.outputs[0], width)
        else:
            yield _linear(node, width) if index == 0 else None


def _moves_tokens(node: Any, width: int) -> bool:
    """Whether the last dimension, of channels, stays as it is."""
    if node.op_type == "Transpose":
        perm = node.attributes["perm"].as_ints()
        return bool(perm[-1] == len(perm) - 1)
    shape = _constant(node.inputs[1]) if node.op_type == "Reshape" else None
    return shape is not None and bool(shape[-1] == width)


def _linear(node: Any, width: int) -> Linear | None:
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    weight, bias, output = _constant(node.inputs[1]), 0.0, node.outputs[0]
    if node.op_type == "Gemm":
        settings = {name: attribute.value for name, attribute in node.attributes.items()}
        if settings.get("alpha", 1.0) != 1.0 or settings.get("beta", 1.0) != 1.0 or settings.get("transA"):
            return None
        weight = weight.T if weight is not None and settings.get("transB") else weight
        bias = _constant(node.inputs[2]) if len(node.inputs) > 2 else bias
    else:
        uses = list(output.uses())
        if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
            added = _constant(uses[0].node.inputs[1 - uses[0].idx])
            if added is not None and added.ndim == 1:
                bias, output = added, uses[0].node.outputs[0]
    if weight is None or bias is None or weight.ndim != 2 or len(weight) != width or weight.dtype != np.float32:
        return None
    return Linear(node, weight, bias, output)
