"""Sparse training: tokens that leave give away all of themselves, and are computed on no more."""

import pytest
import torch

import dtem
from dtem import ops
from dtem.errors import DtemError
from tests.contract import hosts


def test_the_rows_of_largest_mass_are_normalised() -> None:
    edges = torch.rand(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 5
    for r in range(8):
        normalised = ops.normalise_largest(edges, r)
        for image in range(3):
            rows = [edges[image, i].tolist() for i in range(7)]
            giving = sorted(range(7), key=lambda i: (-sum(rows[i]), i))[:r]
            for i, row in enumerate(rows):
                expected = [value / sum(row) for value in row] if i in giving else row
                torch.testing.assert_close(normalised[image, i], torch.tensor(expected, dtype=torch.float64))


def test_of_equal_rows_the_first_are_normalised() -> None:
    normalised = ops.normalise_largest(torch.full((1, 4, 2), 0.25), 2)
    assert normalised.sum(dim=2).tolist() == [[1.0, 1.0, 0.5, 0.5]]


def test_a_row_that_gives_nothing_stays_finite() -> None:
    edges = torch.zeros(1, 4, 2, requires_grad=True)
    ops.normalise_largest(edges, 3).sum().backward()
    assert torch.isfinite(edges.grad).all()


@pytest.mark.parametrize("name", ["distilled", "mae", "dinov2_registers"])
def test_tokens_are_as_many_as_at_inference_and_keep_all_patches(name: str) -> None:
    model, handle = hosts.patched(name, "dtem", 5, sparse=True)
    handle.mode = "soft"
    with handle.trace() as trace:
        model(hosts.images(name))
    for size, left in zip(trace.sizes[: handle.host.num_trainable_blocks], handle.tokens, strict=False):
        assert size.shape[1] == left
        patches = size[:, handle.host.prefix :].sum(dim=1)
        torch.testing.assert_close(patches, torch.full_like(patches, handle.host.patches), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_sharp_enough_it_is_hard_merging(name: str) -> None:
    model, handle = hosts.patched(name, "dtem", 5, sparse=True, temperature=1e-4)
    expected = model(hosts.images(name))
    handle.mode = "soft"
    torch.testing.assert_close(model(hosts.images(name)), expected, rtol=1e-4, atol=1e-4)


def test_every_embedding_that_learns_gets_a_gradient() -> None:
    model, handle = hosts.patched("mae", "dtem", 5, sparse=True)
    handle.mode = "soft"
    hosts.gradients(model, hosts.images("mae"))
    for name, parameter in handle.method.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_it_goes_with_exclusion_by_mass_alone() -> None:
    with pytest.raises(DtemError, match="exclude = 'mass', not 'size'"):
        dtem.patch(hosts.fresh("deit"), sparse=True, exclude="size")
    with pytest.raises(DtemError, match="sparse = 1"):
        dtem.patch(hosts.fresh("deit"), sparse=1)
