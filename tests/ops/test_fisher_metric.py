"""The metric that costs least, against loops and against what it is to order."""

import pytest
import torch

from dtem import ops
from dtem.ops.fisher import FAR


def test_moments_are_sums_over_patches() -> None:
    torch.manual_seed(0)
    h, gradients = torch.randn(2, 5, 3), torch.randn(4, 2, 5, 3)
    moments = ops.moments(h, gradients, prefix=1)
    tokens = [h[image, token] for image in range(2) for token in range(1, 5)]
    slopes = [gradients[k, image, token] for k in range(4) for image in range(2) for token in range(1, 5)]
    assert moments.tokens == 8
    torch.testing.assert_close(moments.h, sum(tokens).double())
    torch.testing.assert_close(moments.hh, sum(token.outer(token) for token in tokens).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.gg, sum(slope.outer(slope) for slope in slopes).double(), rtol=1e-5, atol=1e-5)
    twice = moments.plus(moments)
    assert twice.tokens == 16
    assert torch.equal(twice.gg, 2 * moments.gg)


def test_cosines_of_the_embedding_are_ordered_as_costs() -> None:
    torch.manual_seed(0)
    h, gradients = 3 + torch.randn(1, 40, 6), torch.randn(8, 1, 40, 6) * torch.tensor([5.0, 1, 1, 0.3, 0.1, 0])
    moments = ops.moments(h, gradients)
    weight, bias = ops.distance_embedding(moments, 7)
    bias[-1] = 30.0  # further off, so that cosines of distances are accurate
    z = (h @ weight.T + bias).double()
    cosines = torch.nn.functional.normalize(z[0], dim=-1) @ torch.nn.functional.normalize(z[0], dim=-1).T
    apart = (h[0].unsqueeze(1) - h[0]).double()
    costs = torch.einsum("ijc,cd,ijd->ij", apart, moments.gg, apart)
    pairs = torch.ones(40, 40).triu(1).bool()
    assert ranks_alike(-costs[pairs], cosines[pairs]) > 0.999
    plain = torch.nn.functional.normalize(h[0].double(), dim=-1)
    assert ranks_alike(-costs[pairs], (plain @ plain.T)[pairs]) < 0.8, "the input itself orders them otherwise"


def ranks_alike(one: torch.Tensor, other: torch.Tensor) -> float:
    """Spearman's ρ."""
    ranks = torch.stack([one.argsort().argsort(), other.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("dim", [2, 4, 5, 9])  # narrower than the input, as wide, wider
def test_it_has_the_width_that_is_asked_for(dim: int) -> None:
    torch.manual_seed(0)
    h = 1 + torch.randn(3, 50, 4)
    weight, bias = ops.distance_embedding(ops.moments(h, torch.randn(1, 3, 50, 4)), dim)
    z = h @ weight.T + bias
    assert z.shape == (3, 50, dim)
    torch.testing.assert_close(z[..., -1], torch.full((3, 50), FAR))
    assert z[..., :-1].mean(dim=(0, 1)).abs().max() < 1e-5
    torch.testing.assert_close(z[..., :-1].square().sum(dim=-1).mean(), torch.tensor(1.0))


def test_of_width_one_there_is_the_constant_only() -> None:
    weight, bias = ops.distance_embedding(ops.moments(torch.randn(1, 8, 4), torch.randn(1, 1, 8, 4)), 1)
    assert weight.tolist() == [[0.0] * 4]
    assert bias.tolist() == [FAR]


def test_an_output_that_nothing_matters_to_gives_no_nan() -> None:
    weight, bias = ops.distance_embedding(ops.moments(torch.ones(1, 8, 4), torch.zeros(1, 1, 8, 4)), 3)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
