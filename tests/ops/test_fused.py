"""`dtem::merge`, the operator that a file's own form stands for."""

import pytest
import torch

from dtem import ops


@pytest.mark.parametrize("sized", [False, True])
def test_it_is_match_and_merge(sized: bool) -> None:
    x, metric = torch.randn(3, 14, 6), torch.randn(3, 14, 4)
    size = torch.randint(1, 5, (3, 14)).float() if sized else None
    fused = ops.fused_merge(x, size, metric, torch.arange(3), 5, 2)
    for mine, other in zip(fused, ops.merge(x, size, ops.match(metric, 5, 2)), strict=True):
        torch.testing.assert_close(mine, other)


def test_shapes_are_known_without_values() -> None:
    x, metric = torch.empty(3, 14, 6, device="meta"), torch.empty(3, 14, 4, device="meta")
    merged, size = ops.fused_merge(x, None, metric, torch.empty(3, dtype=torch.int64, device="meta"), 5, 2)
    assert merged.shape == (3, 9, 6)
    assert size.shape == (3, 9)


def test_nothing_but_a_trace_is_whole() -> None:
    with ops.fused_merge_op():
        assert not ops.is_fused_merge()
