"""Two-step merging for dense prediction against loops over tokens."""

import pytest
import torch
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError


def after_hard(tokens: int = 13, r: int = 2, prefix: int = 1, batch: int = 2) -> tuple[Tensor, ops.Matching]:
    x = torch.randn(batch, tokens, 4, dtype=torch.float64)
    return x, ops.match(x, r, prefix)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_kept_rows_are_those_of_the_kept_tokens(prefix: int) -> None:
    x, matching = after_hard(prefix=prefix)
    similarity = ops.cosine(x, prefix)
    rows = ops.kept_rows(similarity, matching, prefix)
    side_a = [position for position in range(prefix, 13) if position % 2 == 0]
    for image in range(2):
        gone = set(matching.merged[image].tolist())
        expected = [similarity[image, place] for place, a in enumerate(side_a) if a not in gone]
        torch.testing.assert_close(rows[image], torch.stack(expected))


def edges_of(x: Tensor, matching: ops.Matching, prefix: int) -> Tensor:
    rows = matching.kept.shape[1] - prefix - ops.cosine(x, prefix).shape[2]
    return torch.rand(x.shape[0], rows, ops.cosine(x, prefix).shape[2], dtype=x.dtype) / 8


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_merge_along_is_a_weighted_mean(prefix: int) -> None:
    x, matching = after_hard(prefix=prefix)
    hard, size = ops.merge(x, None, matching)
    edges = edges_of(x, matching, prefix)
    got, new = ops.merge_along(hard, size, edges, prefix)
    border = prefix + edges.shape[1]
    for image in range(2):
        for j in range(edges.shape[2]):
            mass, total = size[image, border + j].double(), size[image, border + j] * hard[image, border + j]
            for i in range(edges.shape[1]):
                part = edges[image, i, j] * size[image, prefix + i]
                mass, total = mass + part, total + part * hard[image, prefix + i]
            torch.testing.assert_close(got[image, border + j], total / mass)
            torch.testing.assert_close(new[image, border + j].double(), mass)
        for i in range(edges.shape[1]):
            left = size[image, prefix + i] * (1 - edges[image, i].sum())
            torch.testing.assert_close(new[image, prefix + i].double(), left)
    assert torch.equal(got[:, :border], hard[:, :border])
    torch.testing.assert_close(new.sum(1).double(), torch.full((2,), 13.0, dtype=torch.float64))


def test_unmerge_along_hands_back_in_parts() -> None:
    x, matching = after_hard()
    y, _ = ops.merge(x, None, matching)
    edges = edges_of(x, matching, 1)
    got = ops.unmerge_along(y, edges, 1)
    border = 1 + edges.shape[1]
    for image in range(2):
        for i in range(edges.shape[1]):
            expected = (1 - edges[image, i].sum()) * y[image, 1 + i]
            for j in range(edges.shape[2]):
                expected = expected + edges[image, i, j] * y[image, border + j]
            torch.testing.assert_close(got[image, 1 + i], expected)
    assert torch.equal(got[:, :1], y[:, :1])
    assert torch.equal(got[:, border:], y[:, border:])


def test_whole_edges_are_copies() -> None:
    """An edge of weight 1: the token is gone into the other, and gets its answer back, as by a hard merge."""
    x, matching = after_hard(r=0, batch=1)
    edges = torch.zeros(1, 6, 6, dtype=torch.float64)
    edges[0, 2, 4] = 1.0
    merged, size = ops.merge_along(*ops.merge(x, None, matching), edges, 1)
    assert size[0, 3] == 0
    assert size[0, 7 + 4] == 2
    torch.testing.assert_close(merged[0, 7 + 4], (x[0, 6] + x[0, 9]) / 2)  # A: 2, 4, 6 …; B: 1, 3, 5, 7, 9 …
    y = torch.randn_like(merged)
    back = ops.unmerge_along(y, edges, 1)
    assert torch.equal(back[0, 3], y[0, 7 + 4])


def test_gradients() -> None:
    x, matching = after_hard(tokens=9, batch=1)
    hard, size = ops.merge(x, None, matching)
    edges = edges_of(x, matching, 1).requires_grad_()

    def both(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        merged, sizes = ops.merge_along(x, size.double(), edges, 1)
        return ops.unmerge_along(merged, edges, 1), sizes

    assert torch.autograd.gradcheck(both, (hard.clone().requires_grad_(), edges))


def test_an_r_that_cannot_be_is_refused() -> None:
    with pytest.raises(DtemError, match="at most half"):
        ops.match(torch.randn(1, 9, 4), 5, 1)
