import pytest
import torch
import torch.nn.functional as F

from dtem import ops
from dtem.embedding import DecoupledEmbedding
from dtem.errors import DtemError

WIDTH, HEAD = 24, 8


def keys() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(HEAD, WIDTH), torch.randn(HEAD)


def started(dim: int, weight: torch.Tensor, bias: torch.Tensor | None, seed: int = 0) -> DecoupledEmbedding:
    embedding = DecoupledEmbedding(WIDTH, dim)
    embedding.copy_keys(weight, bias, torch.Generator().manual_seed(seed))
    return embedding


@pytest.mark.parametrize("biased", [True, False])
def test_as_wide_as_a_head_it_is_the_keys(biased: bool) -> None:
    weight, bias = keys()
    embedding = started(HEAD, weight, bias if biased else None)
    assert torch.equal(embedding.affine.weight, weight)
    assert torch.equal(embedding.affine.bias, bias if biased else torch.zeros(HEAD))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dim", [HEAD, HEAD + 1, 2 * HEAD, 5 * HEAD])
def test_cosines_are_those_of_the_keys(dim: int, biased: bool) -> None:
    weight, bias = keys()
    if not biased:
        bias = None
    x = torch.randn(3, 21, WIDTH)
    expected = ops.cosine(F.linear(x, weight, bias), 1)
    embedding = started(dim, weight, bias)
    z = embedding(x)
    assert z.shape == (3, 21, dim)
    torch.testing.assert_close(ops.cosine(z, 1), expected, rtol=0, atol=1e-5)
    assert torch.equal(ops.match(z, 8, 1).source, ops.match(F.linear(x, weight, bias), 8, 1).source)


def test_a_wider_start_has_orthonormal_columns() -> None:
    """With W_k = 1, the weight is the lift Q itself: QᵀQ = 1, and no row of Q is idle or a twin of another."""
    embedding = DecoupledEmbedding(HEAD, 2 * HEAD)
    embedding.copy_keys(torch.eye(HEAD), None, torch.Generator().manual_seed(0))
    lift = embedding.affine.weight.detach()
    torch.testing.assert_close(lift.T @ lift, torch.eye(HEAD), rtol=0, atol=1e-6)
    rows = F.normalize(lift, dim=1)
    assert lift.norm(dim=1).min() > 1e-3
    assert ((rows @ rows.T) - torch.eye(2 * HEAD)).abs().max() < 0.999


def test_a_narrower_start_has_orthonormal_rows() -> None:
    embedding = DecoupledEmbedding(HEAD, HEAD - 3)
    embedding.copy_keys(torch.eye(HEAD), None, torch.Generator().manual_seed(0))
    lift = embedding.affine.weight.detach()
    torch.testing.assert_close(lift @ lift.T, torch.eye(HEAD - 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [HEAD, 2 * HEAD])
def test_every_row_learns(dim: int) -> None:
    embedding = started(dim, *keys())
    x = torch.randn(2, 21, WIDTH)
    edges = ops.soft_group(ops.cosine(embedding(x), 1), 6)
    merged = ops.soft_merge(x, torch.ones(2, 21), edges, 6, 1)
    merged.x.square().sum().backward()
    gradient = embedding.affine.weight.grad
    assert (gradient.abs().amax(dim=1) > 1e-4 * gradient.abs().max()).all()
    assert embedding.affine.bias.grad.ne(0).all()


def test_the_seed_decides_the_lift() -> None:
    weight, bias = keys()
    first, again, other = (started(2 * HEAD, weight, bias, seed).affine.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_hidden_layers_cannot_start_from_keys() -> None:
    embedding = DecoupledEmbedding(WIDTH, HEAD, hidden=(16, 12))
    assert embedding(torch.randn(1, 5, WIDTH)).shape == (1, 5, HEAD)
    assert embedding.affine is None
    with pytest.raises(DtemError, match=r"hidden.*init='random'"):
        embedding.copy_keys(*keys())


def test_copying_keys_leaves_the_host_alone() -> None:
    weight, bias = keys()
    embedding = started(HEAD, weight, bias)
    with torch.no_grad():
        embedding.affine.weight.zero_()
        embedding.affine.bias.zero_()
    assert weight.any()
    assert bias.any()
    assert embedding.affine.weight.requires_grad
