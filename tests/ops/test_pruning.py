"""Pruning against sorting by hand, and source maps in which patches are missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtem import ops
from dtem.errors import DtemError


@given(st.integers(0, 3), st.integers(0, 9), st.data())
def test_prune_is_sorting_by_hand(prefix: int, patches: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, patches))
    # few different values: many ties
    scores = [[data.draw(st.integers(0, 3)) for _ in range(prefix + patches)] for _ in range(2)]
    kept, gone = ops.prune(torch.tensor(scores, dtype=torch.float32).view(2, -1), count, prefix)
    for row, stays, goes in zip(scores, kept.tolist(), gone.tolist(), strict=True):
        ranked = sorted(range(prefix, prefix + patches), key=lambda at, row=row: (-row[at], at))
        assert stays == [*range(prefix), *sorted(ranked[: patches - count])]
        assert goes == ranked[patches - count :]


@pytest.mark.parametrize("count", [-1, 6])
def test_more_than_there_is_cannot_be_pruned(count: int) -> None:
    with pytest.raises(DtemError, match=f"{count} .*5 patches"):
        ops.prune(torch.rand(2, 7), count, prefix=2)


def test_pruning_has_no_gradient_of_its_own() -> None:
    score = torch.rand(2, 7, requires_grad=True)
    kept, gone = ops.prune(score, 3, 1)
    assert not kept.requires_grad
    assert not gone.requires_grad


def test_fuse_is_the_weighted_sum() -> None:
    x, weight = torch.randn(2, 5, 3, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    index = torch.tensor([[4, 1], [0, 3]])
    expected = [sum(weight[b, i] * x[b, i] for i in row) for b, row in enumerate(index.tolist())]
    torch.testing.assert_close(ops.fuse(x, weight, index), torch.stack(expected).unsqueeze(1))


def test_fuse_has_gradients() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(2, 5, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[4, 1], [0, 3]])
    assert torch.autograd.gradcheck(lambda x, weight: ops.fuse(x, weight, index), (x, weight))


def test_fuse_is_exact_under_autocast() -> None:
    x, weight, index = torch.randn(2, 5, 3), torch.rand(2, 5), torch.tensor([[4, 1], [0, 3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.fuse(x, weight, index)
    assert got.dtype == torch.float32
    assert torch.equal(got, ops.fuse(x, weight, index))


def test_sources_of_what_was_pruned() -> None:
    kept, gone = torch.tensor([[0, 2, 3]]), torch.tensor([[4, 1]])
    assert ops.pruned_source(kept, gone, 3).tolist() == [[0, 3, 1, 2, 3]]
    assert ops.pruned_source(kept, gone, -1).tolist() == [[0, -1, 1, 2, -1]]


def test_a_dropped_patch_stays_dropped() -> None:
    source, step = torch.tensor([[2, -1, 1, 3]]), torch.tensor([[0, -1, 1, 2]])
    assert ops.compose(source, step).tolist() == [[1, -1, -1, 2]]


@pytest.mark.parametrize("batch", [1, 2])
def test_dropped_patches_cannot_be_unmerged(batch: int) -> None:
    """An index of −1 would silently take a token of the image before."""
    source = torch.tensor([[1, 2, 0]] * batch)
    x = torch.randn(batch, 3, 4)
    assert torch.equal(ops.unmerge(x, source)[:, 2], x[:, 0])
    source[-1, 1] = -1
    with pytest.raises(DtemError, match=f"1 of {3 * batch} patches were dropped"):
        ops.unmerge(x, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_class_attention_ranks_in_full_precision(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 9, 4, dtype=dtype), torch.randn(1, 2, 9, 4, dtype=dtype)
    row = ops.class_attention(q, k, None, 0.5)
    assert row.dtype == torch.float32
    assert torch.equal(row, ops.class_attention(q.float(), k.float(), None, 0.5))
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(ops.class_attention(q.float(), k.float(), None, 0.5), row)
