"""Translations of torch operators to ONNX, in forms that runtimes recognise and fuse.

torch's own exporter has no stable sort, and writes GELU and attention in forms that runtimes do not recognise. These
translations serve merged and unmerged models alike. Loops and data-dependent shapes do not occur.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from dtem.exporters import onnx_merge

OPSET = 18


def table() -> dict[Any, Callable[..., Any]]:
    """Translations by torch operator, for `torch.onnx.export`."""
    import onnxscript

    op: Any = onnxscript.opset18

    def sort(self: Any, stable: bool = False, dim: int = -1, descending: bool = False) -> Any:
        """A stable sort is TopK of everything: ONNX, too, gives ties to the lower index."""
        count = op.Constant(value_ints=[int(self.shape[dim])])
        return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)

    def gelu(self: Any, approximate: str = "none") -> Any:
        """x (1 + erf(x / √2)) / 2, in the order of operations that runtimes look for."""
        if approximate == "tanh":
            inner = op.Mul(self, op.Mul(self, self))
            inner = op.Add(self, op.Mul(inner, op.Constant(value_float=0.044715)))
            inner = op.Tanh(op.Mul(inner, op.Constant(value_float=math.sqrt(2 / math.pi))))
        else:
            inner = op.Erf(op.Div(self, op.Constant(value_float=math.sqrt(2))))
        return op.Mul(op.Mul(self, op.Add(inner, op.Constant(value_float=1.0))), op.Constant(value_float=0.5))

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """softmax(s q kᵀ + mask) v."""
        factor = op.Constant(value_float=float(scale or int(query.shape[-1]) ** -0.5))
        logits = op.MatMul(op.Mul(query, factor), op.Transpose(key, perm=[0, 1, 3, 2]))
        if attn_mask is not None:
            logits = op.Add(logits, attn_mask)
        return op.MatMul(op.Softmax(logits, axis=-1), value)

    aten = torch.ops.aten
    return {
        aten.sort.stable: sort,
        aten.gelu.default: gelu,
        aten.scaled_dot_product_attention.default: attention,
        torch.ops.dtem.merge.default: onnx_merge.merge,
    }
