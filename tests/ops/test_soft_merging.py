"""Soft merging: the equations token by token, the order, and the limit of hard merging."""

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtem import ops
from dtem.errors import DtemError

PREFIXES = pytest.mark.parametrize("prefix", [0, 1, 2, 5])


def tokens_and_edges(
    batch: int, prefix: int, patches: int, excluded: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens, and edges of rows that give away different shares: no two tokens tie but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + patches + excluded
    x = torch.randn(batch, tokens, 4, dtype=torch.float64, generator=generator)
    size = 0.2 + 2 * torch.rand(batch, tokens, dtype=torch.float64, generator=generator)
    side_a, side_b = oracles.split(prefix + patches, prefix)
    rows = torch.randn(batch, len(side_a), len(side_b), dtype=torch.float64, generator=generator).softmax(dim=2)
    weights = 0.95 * torch.rand(batch, len(side_a), 1, dtype=torch.float64, generator=generator)
    return x, size, rows * weights


def assert_is_oracle(x, size, edges, r: int, prefix: int, excluded: int, exclude: str) -> ops.SoftMerge:
    merged = ops.soft_merge(x, size, edges, r, prefix, excluded, exclude)
    assert merged.excluded == excluded + r
    for image in range(x.shape[0]):
        expected = oracles.soft_merge(x[image], size[image], edges[image], r, prefix, excluded, exclude)
        torch.testing.assert_close(merged.x[image], expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(merged.size[image], expected[1], rtol=1e-10, atol=1e-12)
    return merged


@PREFIXES
@pytest.mark.parametrize("patches", [2, 9, 10])
@pytest.mark.parametrize("excluded", [0, 3])
@pytest.mark.parametrize("exclude", ["mass", "size"])
def test_soft_merge_is_the_loop(prefix: int, patches: int, excluded: int, exclude: str) -> None:
    x, size, edges = tokens_and_edges(2, prefix, patches, excluded)
    for r in range(ops.limit(patches) + 1):
        assert_is_oracle(x, size, edges, r, prefix, excluded, exclude)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_soft_merge_is_the_loop_for_any_shape(data: st.DataObject) -> None:
    prefix, patches = data.draw(st.integers(0, 6)), data.draw(st.integers(2, 16))
    excluded, r = data.draw(st.integers(0, 4)), data.draw(st.integers(0, patches // 2))
    batch, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2**31))
    x, size, edges = tokens_and_edges(batch, prefix, patches, excluded, seed)
    assert_is_oracle(x, size, edges, r, prefix, excluded, data.draw(st.sampled_from(["mass", "size"])))


def test_exclusion_by_size_takes_small_tokens_of_either_side() -> None:
    """The paper's rule differs from ours: a small B token that receives nothing leaves, too."""
    x, size = torch.randn(1, 6, 2), torch.tensor([[1.0, 0.1, 1.0, 1.0, 1.0, 1.0]])
    edges = torch.zeros(1, 3, 3)
    edges[0, 2, 1] = 0.5  # A token at position 4 gives half of itself to the B token at position 3
    by_size = ops.soft_merge(x, size, edges, 2, exclude="size")
    assert by_size.order.tolist() == [[0, 1, 4, 5, 3, 2]]  # in [A, B]: B₀ has 0.1, A₂ has 0.5
    by_mass = ops.soft_merge(x, size, edges, 2, exclude="mass")
    assert by_mass.order.tolist() == [[1, 3, 4, 5, 2, 0]]  # A₂ gave most; of equals the lower index


@PREFIXES
def test_sizes_sum_to_n_down_to_the_limit(prefix: int) -> None:
    patches, depth = 24, 6
    tokens = prefix + patches
    for exclude in ("mass", "size"):
        x, size, excluded = torch.randn(3, tokens, 4), torch.ones(3, tokens), 0
        for _ in range(depth):
            active = patches - excluded
            r = ops.limit(active)
            edges = ops.soft_group(ops.cosine(x, prefix, excluded), r)
            x, size, excluded, order = ops.soft_merge(x, size, edges, r, prefix, excluded, exclude)
            assert order.sort(dim=1).values.tolist() == [list(range(active))] * 3
            torch.testing.assert_close(size.sum(dim=1), torch.full((3,), float(tokens)))
            assert torch.equal(size[:, :prefix], torch.ones(3, prefix))
            assert (size >= 0).all()
        assert patches - excluded == 1


@PREFIXES
@pytest.mark.parametrize("patches", [15, 16])
def test_cold_soft_merging_is_hard_merging(prefix: int, patches: int) -> None:
    """As τ → 0: the same tokens kept in the same order, the same features and sizes, nothing left of the others."""
    tokens = prefix + patches
    metric = torch.randn(2, tokens, 8, dtype=torch.float64)
    x = torch.randn(2, tokens, 4, dtype=torch.float64)
    hard_x, hard_size, hard_metric = x, torch.ones(2, tokens, dtype=torch.float64), metric
    soft_x, soft_size, soft_metric, excluded = x, hard_size, metric, 0
    for r in (3, 0, 4, 2, 3, 1):
        matching = ops.match(hard_metric, r, prefix)
        hard_x, hard_size = ops.merge(hard_x, hard_size, matching)
        edges = ops.soft_group(ops.cosine(soft_metric, prefix, excluded), r, temperature=1e-5)
        gone = excluded
        soft_x, soft_size, excluded, order = ops.soft_merge(soft_x, soft_size, edges, r, prefix, excluded)

        active = tokens - excluded
        side_a, side_b = oracles.split(tokens - gone, prefix)
        came_from = torch.tensor([*side_a, *side_b])[order]
        assert came_from[:, : active - prefix].tolist() == matching.kept[:, prefix:].tolist()
        gone_now = came_from[:, active - prefix :].sort(dim=1).values  # which comes first is of no account
        assert gone_now.tolist() == matching.merged.sort(dim=1).values.tolist()
        torch.testing.assert_close(soft_x[:, :active], hard_x, rtol=0, atol=1e-8)
        torch.testing.assert_close(soft_size[:, :active], hard_size, rtol=0, atol=1e-8)
        assert (soft_size[:, active:] < 1e-8).all()

        hard_metric = torch.randn(2, active, 8, dtype=torch.float64)  # a new metric for the next block, of both
        soft_metric = torch.cat([hard_metric, torch.randn(2, excluded, 8, dtype=torch.float64)], dim=1)


def test_a_warm_merge_is_not_hard() -> None:
    """The limit above is one: at the training temperature the two differ."""
    metric, x = torch.randn(2, 1, 17, 8, dtype=torch.float64)
    hard, _ = ops.merge(x, None, ops.match(metric, 4, 1))
    soft = ops.soft_merge(x, torch.ones(1, 17, dtype=torch.float64), ops.soft_group(ops.cosine(metric, 1), 4), 4, 1)
    assert (soft.x[:, :13] - hard).abs().max() > 1e-3


@pytest.mark.parametrize("exclude", ["mass", "size"])
def test_gradcheck_soft_merge(exclude: str) -> None:
    x, size, edges = tokens_and_edges(2, 1, 7, 2)
    inputs = tuple(t.detach().clone().requires_grad_() for t in (x, size, edges))

    def run(x, size, edges):
        merged = ops.soft_merge(x, size, edges, 3, 1, 2, exclude)
        return merged.x, merged.size

    assert torch.autograd.gradcheck(run, inputs)


def test_a_row_that_rounds_above_one_keeps_the_gradient_of_its_size() -> None:
    """m̂_i = m_i (1 − Σ_j E_ij) has the gradient −m_i in E, whichever way a sum of 1 was rounded."""
    x, size = torch.randn(1, 6, 2), torch.ones(1, 6)
    edges = torch.full((1, 3, 3), 1 / 3)
    edges[0, 0, 0] += 1e-6
    edges[0, 1, 0] -= 1e-6
    edges.requires_grad_()
    _, left, _ = ops.merging.flow(x[:, ::2], size[:, ::2], x[:, 1::2], size[:, 1::2], edges)
    assert (left >= 0).all()
    assert left[0, 0] == 0
    (gradient,) = torch.autograd.grad(left.sum(), edges)
    assert torch.equal(gradient, -torch.ones_like(edges))


def test_gradcheck_group_and_merge() -> None:
    """Embedding to merged tokens, as training runs it."""
    z = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 7, 2, dtype=torch.float64, requires_grad=True)
    size = (0.5 + torch.rand(1, 7, dtype=torch.float64)).requires_grad_()

    def run(z, x, size):
        edges = ops.soft_group(ops.cosine(z, 1), 2, temperature=1.0, scale=2.0)
        merged = ops.soft_merge(x, size, edges, 2, 1)
        return merged.x, merged.size

    mass, _ = ops.row_mass(torch.logsumexp(ops.cosine(z, 1).detach() / 2.0, dim=2), 2, 1.0)
    assert mass.max() < 0.999, "the clip's denominator has no gradient: finite differences would see one"
    assert torch.autograd.gradcheck(run, (z, x, size))


@pytest.mark.parametrize("r", [-1, 5, 99])
def test_impossible_r_is_refused_by_name(r: int) -> None:
    x, size, edges = tokens_and_edges(1, 1, 8, 2)
    with pytest.raises(DtemError, match=rf"r = {r} .*8 patches"):
        ops.soft_merge(x, size, edges, r, 1, 2)


def test_unknown_exclusion_is_refused_by_name() -> None:
    x, size, edges = tokens_and_edges(1, 1, 8, 0)
    with pytest.raises(DtemError, match=r"exclude = 'age'.*'mass'.*'size'"):
        ops.soft_merge(x, size, edges, 2, 1, exclude="age")
