"""Bipartite matching and merging (`dtem::merge`) in standard ONNX operators.

At batch 1 the number of operators decides the time, so there are few: one product for the similarities, three TopK for
the matching (ties go to the lower index, as in PyTorch), one gather of the rows that stay; then only the r destination
rows are computed and scattered back. Tokens that merge into the same destination are summed by an r × r matrix, so
every one of its rows has the full sum, and it does not matter which is written last.
"""

from typing import Any

import numpy as np

from dtem.ops import sides


def merge(x: Any, size: Any, metric: Any, images: Any, r: int, prefix: int) -> Any:
    """Translation of `dtem::merge` (`ops.fused`)."""
    import onnxscript

    op: Any = onnxscript.opset18
    tokens = int(x.shape[1])
    a, b = (np.arange(first, tokens, 2) for first in sides(prefix))
    kept_a = len(a) - r

    def ints(*values: int) -> Any:
        return op.Constant(value_ints=list(values))

    def floats(value: float) -> Any:
        return op.Constant(value_float=value)

    def table(values: Any) -> Any:
        import onnx

        return op.Constant(value=onnx.numpy_helper.from_array(np.asarray(values, dtype=np.int64)))

    def every_other(rows: Any, first: int) -> Any:
        return op.Slice(rows, ints(first), ints(tokens), ints(1), ints(2))

    def rows(of: Any, index: Any) -> Any:
        return op.GatherND(of, index, batch_dims=1)

    # Matching: every index has the shape (b, k, 1), by which GatherND takes whole rows of each image.
    unit = op.LpNormalization(metric, axis=-1, p=2)
    cosines = op.MatMul(every_other(unit, int(a[0])), op.Transpose(every_other(unit, int(b[0])), perm=[0, 2, 1]))
    best, partner = op.TopK(cosines, ints(1), axis=2)
    _, order = op.TopK(best, ints(len(a)), axis=1)
    chosen = op.Slice(order, ints(0), ints(r), ints(1))
    merged, joins = op.Gather(table(a), chosen), op.GatherElements(partner, chosen, axis=1)
    into = op.Add(joins, ints(prefix + kept_a))

    fixed = table(np.concatenate([np.arange(prefix), np.zeros(kept_a, np.int64), b])[:, None])
    if kept_a:
        rest, _ = op.TopK(op.Slice(order, ints(r), ints(len(a)), ints(1)), ints(kept_a), axis=1, largest=0)
        kept = op.Add(op.Pad(op.Gather(table(a), rest), ints(0, prefix, 0, 0, len(b), 0)), fixed)
    else:
        kept = op.Expand(fixed, op.Concat(op.Shape(images), ints(1, 1), axis=0))

    # Merging: x_j + Σ_i m_i (x_i − x_j) / m̂_j for the r rows that receive.
    same = op.Equal(joins, op.Reshape(joins, ints(0, 1, -1)))
    out = rows(x, kept)
    now = rows(out, into)
    if size is None:
        shares = op.Where(same, floats(1.0), floats(0.0))
        total = op.Add(op.ReduceSum(shares, ints(2)), floats(1.0))
        sizes = op.Expand(floats(1.0), op.Shape(kept))
    else:
        column = op.Unsqueeze(size, ints(2))
        sizes = rows(column, kept)
        shares = op.Where(same, op.Reshape(rows(column, merged), ints(0, 1, -1)), floats(0.0))
        total = op.Add(op.ReduceSum(shares, ints(2)), rows(sizes, into))
    new = op.Add(now, op.MatMul(op.Div(shares, total), op.Sub(rows(x, merged), now)))
    place = op.Concat(op.Expand(op.Reshape(images, ints(-1, 1, 1)), ints(1, r, 1)), into, axis=2)
    return op.ScatterND(out, place, new), op.Squeeze(op.ScatterND(sizes, place, total), ints(2))
