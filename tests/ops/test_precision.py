"""Half precision, autocast, and what soft training does to sizes: nothing may turn into NaN."""

import contextlib

import pytest
import torch

from dtem import ops

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def chain(z: torch.Tensor, x: torch.Tensor, size: torch.Tensor, blocks: list[int], **group) -> torch.Tensor:
    """Soft blocks as in training: attention with log sizes, grouping, merging. Returns one number to differentiate."""
    excluded, prefix = 0, 1
    for r in blocks:
        heads = x.unflatten(2, (2, -1)).transpose(1, 2)
        y = ops.attend(heads, heads, heads, ops.log_size(size), 0.5)
        x = x + y.transpose(1, 2).flatten(2).to(x.dtype)
        edges = ops.soft_group(ops.cosine(x * z, prefix, excluded), r, **group)
        x, size, excluded, _ = ops.soft_merge(x, size, edges, r, prefix, excluded)
        assert torch.isfinite(x).all()
        assert torch.isfinite(size).all()
        assert (size >= 0).all()
        total = size.sum(dim=1).detach()
        torch.testing.assert_close(total, total.new_full(total.shape, x.shape[1]), rtol=1e-4, atol=1e-4)
    bias = ops.log_size(size)
    assert torch.isfinite(bias).all()
    return x.float().square().mean() + bias.mean()


def leaves(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 33, 8).to(dtype).requires_grad_(), torch.randn(2, 33, 8).to(dtype).requires_grad_()


@pytest.mark.parametrize("temperature", [0.1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("blocks", [[16, 8, 4, 2, 1], [8, 8, 8, 4, 2], [1] * 6])
@pytest.mark.parametrize("candidates", [None, 2])
def test_soft_chain_is_finite(temperature: float, blocks: list[int], candidates: int | None) -> None:
    z, x = leaves()
    chain(z, x, torch.ones(2, 33), blocks, temperature=temperature, candidates=candidates).backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(z.grad).all()
    assert x.grad.any()
    assert z.grad.any() or temperature < 1e-3  # colder than that, the choice is made


def test_soft_chain_with_identical_tokens_is_finite() -> None:
    z, x = torch.ones(2, 33, 8, requires_grad=True), torch.ones(2, 33, 8, requires_grad=True)
    chain(z, x, torch.ones(2, 33), [16, 8, 4], temperature=1e-3).backward()
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(x.grad).all()


def test_zero_sizes_stay_finite() -> None:
    """Tokens of size 0 on both sides, and one by rounding below it, merge without dividing by nothing."""
    z, x = leaves()
    size = torch.ones(2, 33)
    size[:, [3, 4, 5, 10, 11]] = 0.0
    size.requires_grad_()
    edges = ops.soft_group(ops.cosine(z, 1), 16, temperature=1e-3)
    merged = ops.soft_merge(x, size, edges, 16, 1)
    heads = merged.x.unflatten(2, (2, -1)).transpose(1, 2)
    out = ops.attend(heads, heads, heads, ops.log_size(merged.size), 0.5)
    (out.square().sum() + merged.size.square().sum()).backward()
    assert torch.isfinite(out).all()
    for leaf in (z, x, size):
        assert torch.isfinite(leaf.grad).all()


def test_all_zero_sizes_keep_features() -> None:
    """A token whose size has gone to nothing keeps its feature: 0 / 0 is never taken."""
    x, size = torch.randn(1, 9, 4), torch.zeros(1, 9)
    merged = ops.soft_merge(x, size, ops.soft_group(ops.cosine(x, 1), 2), 2, 1)
    assert torch.equal(merged.x[:, 1:], ops.take(x[:, [2, 4, 6, 8, 1, 3, 5, 7]], merged.order))
    assert not merged.size.any()


@HALVES
def test_half_inputs(dtype: torch.dtype) -> None:
    z, x = leaves(dtype)
    assert ops.cosine(z, 1).dtype == torch.float32
    assert torch.equal(ops.cosine(z, 1), ops.cosine(z.float(), 1))
    edges = ops.soft_group(ops.cosine(z, 1).to(dtype), 8)
    assert edges.dtype == torch.float32
    merged = ops.soft_merge(x, torch.ones(2, 33), edges, 8, 1)
    assert (merged.x.dtype, merged.size.dtype) == (dtype, torch.float32)
    hard_x, hard_size = ops.merge(x, None, ops.match(z, 8, 1))
    assert (hard_x.dtype, hard_size.dtype) == (dtype, torch.float32)
    assert torch.isfinite(hard_x).all()

    loss = chain(z, x, torch.ones(2, 33), [16, 8, 4], temperature=1e-2)
    (loss * 2.0**-10).backward()  # float16 trains with a loss scale: a token of size 0 can have a large gradient
    for leaf in (z, x):
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.any()


@HALVES
def test_half_merge_is_near_the_exact_one(dtype: torch.dtype) -> None:
    x = torch.randn(2, 33, 8)
    matching = ops.match(x, 16, 1)
    exact, _ = ops.merge(x, None, matching)
    half, _ = ops.merge(x.to(dtype), None, matching)
    torch.testing.assert_close(half.float(), exact, rtol=0.02, atol=0.05)
    edges = ops.soft_group(ops.cosine(x, 1), 16)
    exact = ops.soft_merge(x, torch.ones(2, 33), edges, 16, 1).x
    half = ops.soft_merge(x.to(dtype), torch.ones(2, 33), edges, 16, 1).x
    torch.testing.assert_close(half.float(), exact, rtol=0.02, atol=0.05)


def test_half_size_counts_do_not_round() -> None:
    """bfloat16 cannot count to 257: sizes are kept in float32 whatever the features are."""
    x = torch.ones(1, 600, 2, dtype=torch.bfloat16)
    size = None
    while x.shape[1] > 1:
        x, size = ops.merge(x, size, ops.match(x, ops.limit(x.shape[1]), 0))
        assert size.sum().item() == 600


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast(enabled: bool) -> None:
    z, x = leaves()
    outside = ops.cosine(z, 1)
    matched_outside = ops.match(z, 12, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16) if enabled else contextlib.nullcontext():
        inside = ops.cosine(z, 1)
        assert inside.dtype == torch.float32
        assert torch.equal(inside, outside), "similarities are float32 ones, not rounded ones"
        assert ops.soft_group(inside, 8).dtype == torch.float32
        matched = ops.match(z, 12, 1)
        assert torch.equal(matched.source, matched_outside.source)
        loss = chain(z, x, torch.ones(2, 33), [16, 8, 4, 2], temperature=1e-2)
    loss.backward()
    for leaf in (z, x):
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.any()


def test_autocast_soft_group_is_exact() -> None:
    """Grouping runs in float32 under autocast: same value and gradient, bit for bit."""
    s = (2 * torch.rand(2, 8, 8) - 1).requires_grad_()
    plain = ops.soft_group(s, 4)
    (plain_grad,) = torch.autograd.grad(plain.square().sum(), s)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ops.soft_group(s, 4)
        (cast_grad,) = torch.autograd.grad(cast.square().sum(), s)
    assert torch.equal(plain, cast)
    assert torch.equal(plain_grad, cast_grad)
