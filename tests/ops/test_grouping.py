"""Soft grouping against the literal loop over A×B."""

import oracles
import pytest
import torch

from dtem import ops
from dtem.errors import DtemError

SHARP = {"temperature": 0.1, "scale": 0.1}
BLUNT = {"temperature": 1.0, "scale": 0.5}  # rows are picked again and again: the clip is at work


def similarity(batch: int = 2, i: int = 7, j: int = 6) -> torch.Tensor:
    return (2 * torch.rand(batch, i, j, dtype=torch.float64) - 1).requires_grad_()


def value_and_gradient(group, s: torch.Tensor, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    edges = group(s, **settings)
    weight = torch.randn(edges.shape, dtype=edges.dtype, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((edges * weight).sum(), s)
    return edges, gradient


def assert_is_loop(s: torch.Tensor, **settings) -> torch.Tensor:
    edges, gradient = value_and_gradient(ops.soft_group, s, **settings)
    expected, expected_gradient = value_and_gradient(oracles.soft_group, s, **settings)
    torch.testing.assert_close(edges, expected, rtol=1e-11, atol=1e-13)
    scale = expected_gradient.abs().max().clamp(min=1e-300)
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=0, atol=1e-11)
    return edges


@pytest.mark.parametrize("r", [1, 2, 4, 6])
@pytest.mark.parametrize("temperature", [0.1, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("candidates", [None, 1, 3, 99])
def test_value_and_gradient_are_the_literal_loop(
    r: int, temperature: float, scale: float, candidates: int | None
) -> None:
    edges = assert_is_loop(similarity(), r=r, temperature=temperature, scale=scale, candidates=candidates)
    if candidates is not None:
        assert (edges > 0).sum(dim=2).max() <= candidates


@pytest.mark.parametrize(("i", "j"), [(2, 2), (4, 5), (5, 4), (9, 9)])
def test_any_shape_up_to_the_limit(i: int, j: int) -> None:
    for r in range(1, (i + j) // 2 + 1):
        assert_is_loop(similarity(3, i, j), r=r, temperature=1.0, scale=1.0)


def test_a_single_pair_merges_whole() -> None:
    """Here the literal loop takes log 0; ours must not."""
    s = similarity(1, 1, 1)
    edges, gradient = value_and_gradient(ops.soft_group, s, r=1)
    assert edges.tolist() == [[[1.0]]]
    assert gradient.tolist() == [[[0.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_used_up_stay_finite(dtype: torch.dtype) -> None:
    """Cold and with fewer rows than steps, every p reaches 1 exactly: log(1 − p) must stay a number."""
    s = similarity(2, 2, 5).detach().to(dtype).requires_grad_()
    edges, gradient = value_and_gradient(ops.soft_group, s, r=3, temperature=1e-3)
    assert torch.isfinite(edges).all()
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(edges.sum(dim=2), torch.ones(2, 2, dtype=dtype))


def test_the_clip_is_at_work_and_has_no_gradient() -> None:
    """One row far ahead of the rest at a high temperature is chosen more than once in total."""
    s = similarity()
    with torch.no_grad():
        s[:, 0] += 3
    mass, _ = ops.row_mass(torch.logsumexp(s.detach() / 0.5, dim=2), 5, 1.0)
    assert (mass > 1.05).any(), "the case must reach the clip"
    edges = assert_is_loop(s, r=5, **BLUNT)
    clipped = edges.sum(dim=2)[mass > 1]
    torch.testing.assert_close(clipped, torch.ones_like(clipped))


def test_rows_never_give_more_than_they_have() -> None:
    for settings in (SHARP, BLUNT):
        for r in range(7):
            assert ops.soft_group(similarity(), r, **settings).sum(dim=2).max() <= 1 + 1e-12


def test_total_mass_is_r_where_nothing_is_clipped() -> None:
    for r in range(5):
        mass, steps = ops.row_mass(torch.randn(2, 8, dtype=torch.float64), r, 0.7)
        assert steps.shape == (r, 2, 8)
        torch.testing.assert_close(mass.sum(dim=1), torch.full((2,), float(r), dtype=torch.float64))


def test_r_zero_gives_no_edges_and_no_gradient() -> None:
    edges, gradient = value_and_gradient(ops.soft_group, similarity(), r=0)
    assert not edges.any()
    assert not gradient.any()


@pytest.mark.parametrize("candidates", [None, 2])
def test_gradcheck(candidates: int | None) -> None:
    s = similarity(2, 5, 4)
    settings = {"r": 2, "temperature": 0.5, "scale": 0.5, "candidates": candidates}
    masked = s.detach() if candidates is None else s.detach() + oracles.candidate_mask(s, candidates)
    mass, _ = ops.row_mass(torch.logsumexp(masked / 0.25, dim=2), 2, 0.5)
    assert mass.max() < 0.999, "the clip's denominator has no gradient: finite differences would see one"
    assert torch.autograd.gradcheck(lambda s: ops.soft_group(s, **settings), (s,))


@pytest.mark.parametrize("alike", [-1.0, 0.0, 1.0])
def test_candidates_break_ties_by_the_lower_index(alike: float) -> None:
    edges = ops.soft_group(torch.full((1, 3, 4), alike), 1, candidates=2)
    assert (edges > 0).tolist() == [[[True, True, False, False]] * 3]


@pytest.mark.parametrize("candidates", [0, -3])
def test_impossible_candidates_are_refused_by_name(candidates: int) -> None:
    with pytest.raises(DtemError, match=f"candidates = {candidates} "):
        ops.soft_group(similarity(), 1, candidates=candidates)


@pytest.mark.parametrize("r", [-1, 7, 400])
def test_impossible_r_is_refused_by_name(r: int) -> None:
    with pytest.raises(DtemError, match=f"r = {r} "):
        ops.soft_group(similarity(), r)  # 13 patches: at most 6
