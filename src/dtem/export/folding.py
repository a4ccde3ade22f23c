"""Linear layers after a norm without biases, exactly: each bias is one more pass over memory.

What a norm makes of a token sums to nothing, Σ_i x̂_i = 0. So if it gives x̂ + 1 instead of γ x̂ + β, its C numbers sum
to C, whatever the token, and a linear layer can hold all that is constant in its weights:

    (γ x̂ + β) W + b  =  (x̂ + 1) W'        W'_ij = γ_i W_ij + t_j        C t_j = b_j + Σ_i (β_i − γ_i) W_ij
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]


class Linear(NamedTuple):
    """A node that multiplies by a weight (c, k), with its bias."""

    node: Any
    weight: Weights
    bias: Weights | float = 0.0
    add: Any = None
    """The node that adds the bias, where the product does not."""


def fold(model: Any) -> int:
    """Change an onnx.ModelProto in place, and say for how many norms.

    A norm that anything but linear layers reads stays as it is.
    """
    graph = _Graph(model.graph)
    folded = 0
    for norm in graph.norms():
        scale = graph.weight(norm.input[1])
        shift = graph.weight(norm.input[2]) if len(norm.input) > 2 else 0.0
        if scale is None or shift is None or scale.ndim != 1:
            continue
        layers = list(graph.layers(norm.output[0], len(scale)))
        if None in layers:
            continue
        norm.input[1:] = [graph.add_weight(f"{norm.output[0]}.ones", np.ones_like(scale))] * 2
        for layer in filter(None, layers):
            graph.put(layer, absorbed(layer, scale, shift))
        folded += 1
    graph.tidy()
    return folded


def absorbed(layer: Linear, scale: Weights, shift: Weights | float) -> Weights:
    """W' of above."""
    weight = layer.weight.astype(np.float64)
    constant = layer.bias + (shift - scale.astype(np.float64)) @ weight
    return (scale[:, None] * weight + constant / len(scale)).astype(np.float32)


class _Graph:
    """A GraphProto with who reads what."""

    def __init__(self, proto: Any) -> None:
        self.proto = proto
        self._weights = {weight.name: weight for weight in proto.initializer}
        self._readers: dict[str, list[Any]] = defaultdict(list)
        for node in proto.node:
            for value in set(node.input):
                self._readers[value].append(node)
        for output in proto.output:
            self._readers[output.name].append(output)  # whoever runs the file reads it

    def weight(self, name: str) -> Any:
        """A constant of the graph, or None."""
        from onnx import numpy_helper

        return numpy_helper.to_array(self._weights[name]) if name in self._weights else None

    def add_weight(self, name: str, values: Weights) -> str:
        """A new constant; returns its name."""
        from onnx import numpy_helper

        self.proto.initializer.append(numpy_helper.from_array(values, name))
        return name

    def norms(self) -> list[Any]:
        return [node for node in self.proto.node if node.op_type == "LayerNormalization"]

    def layers(self, value: str, width: int) -> Iterator[Linear | None]:
        """The linear layers that read `value`, also where its tokens were moved about before; None for others."""
        for node in self._readers[value]:
            if self._moves_tokens(node, value, width):
                yield from self.layers(node.output[0], width)
            else:
                yield self._linear(node, value, width)

    def _moves_tokens(self, node: Any, value: str, width: int) -> bool:
        kind = getattr(node, "op_type", "")
        if kind == "Transpose":
            perm = _attributes(node)["perm"]
            return bool(perm[-1] == len(perm) - 1)
        shape = self.weight(node.input[1]) if kind == "Reshape" and node.input[0] == value else None
        return shape is not None and bool(shape[-1] == width)

    def _linear(self, node: Any, value: str, width: int) -> Linear | None:
        kind = getattr(node, "op_type", "")
        if kind not in ("MatMul", "Gemm") or node.input[0] != value:
            return None
        weight, bias, add = self.weight(node.input[1]), 0.0, None
        if kind == "Gemm":
            plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
            settings = {**plain, "transB": 0, **_attributes(node)}
            if any(settings[key] != plain[key] for key in plain):
                return None
            weight = weight.T if weight is not None and settings["transB"] else weight
            bias = self.weight(node.input[2]) if len(node.input) > 2 else bias
        else:
            readers = self._readers[node.output[0]]
            if len(readers) == 1 and getattr(readers[0], "op_type", "") == "Add":
                (other,) = set(readers[0].input) - {node.output[0]} or {""}
                added = self.weight(other)
                if added is not None and added.ndim == 1:
                    bias, add = added, readers[0]
        if weight is None or bias is None or weight.ndim != 2 or len(weight) != width or weight.dtype != np.float32:
            return None
        return Linear(node, weight, bias, add)

    def put(self, layer: Linear, weight: Weights) -> None:
        """Let the layer multiply by another weight, with nothing to add."""
        node = layer.node
        node.op_type, node.input[1:] = "MatMul", [self.add_weight(f"{node.output[0]}.weight", weight)]
        del node.attribute[:]
        if layer.add is not None:
            node.output[0] = layer.add.output[0]
            self.proto.node.remove(layer.add)

    def tidy(self) -> None:
        """Leave out weights that nobody reads any more."""
        read = {value for node in self.proto.node for value in node.input}
        kept = [weight for weight in self.proto.initializer if weight.name in read]
        del self.proto.initializer[:]
        self.proto.initializer.extend(kept)


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
