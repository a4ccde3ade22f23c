import math

import oracles
import pytest
import torch

from dtem import ops
from dtem.types import SIZE_FLOOR


def qkv(batch: int = 2, heads: int = 2, tokens: int = 9, width: int = 4, dtype=torch.float64) -> list[torch.Tensor]:
    return list(torch.randn(3, batch, heads, tokens, width, dtype=dtype))


def sizes(batch: int = 2, tokens: int = 9, dtype=torch.float64) -> torch.Tensor:
    return 0.2 + 5 * torch.rand(batch, tokens, dtype=dtype)


@pytest.mark.parametrize("scale", [0.5, 0.125, 1.7])
@pytest.mark.parametrize("way", ["none", "mask", "channel"])
def test_attend_is_the_explicit_softmax(scale: float, way: str) -> None:
    q, k, v = qkv()
    bias = None if way == "none" else ops.log_size(sizes()).requires_grad_(way == "channel")
    out = ops.attend(q, k, v, bias, scale)
    torch.testing.assert_close(out, oracles.attention(q, k, v, bias, scale), rtol=1e-10, atol=1e-12)


def test_mask_and_channel_give_the_same() -> None:
    q, k, v = qkv(dtype=torch.float32)
    bias = ops.log_size(sizes(dtype=torch.float32))
    masked, channelled = ops.attend(q, k, v, bias, 0.5), ops.attend(q, k, v, bias.clone().requires_grad_(), 0.5)
    assert not masked.requires_grad
    assert channelled.requires_grad, "the second must have gone the differentiable way"
    torch.testing.assert_close(masked, channelled, rtol=1e-5, atol=1e-6)


def test_a_token_of_size_m_counts_as_m_tokens() -> None:
    q, k, v = qkv(tokens=4)
    count = torch.tensor([1, 3, 2, 1])
    repeated = oracles.attention(q, k.repeat_interleave(count, 2), v.repeat_interleave(count, 2), None, 0.5)
    weighted = ops.attend(q, k, v, ops.log_size(count.expand(2, -1).double()), 0.5)
    torch.testing.assert_close(weighted, repeated, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["none", "mask", "channel"])
def test_fewer_queries_than_keys(way: str) -> None:
    """The last block's shortcut asks for the prefix tokens only."""
    q, k, v = qkv()
    bias = None if way == "none" else ops.log_size(sizes()).requires_grad_(way == "channel")
    out = ops.attend(q[:, :, :2], k, v, bias, 0.5)
    torch.testing.assert_close(out, oracles.attention(q, k, v, bias, 0.5)[:, :, :2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["none", "mask"])
@pytest.mark.parametrize("tokens", [139, 140, 165, 191, 192, 197])
def test_padded_queries_change_nothing(tokens: int, way: str) -> None:
    """On CPU without gradients some lengths get zero queries on top; what comes out is what was asked for."""
    q, k, v = qkv(tokens=tokens, width=8, dtype=torch.float32)
    bias = None if way == "none" else ops.log_size(sizes(tokens=tokens, dtype=torch.float32))
    with torch.no_grad():
        out = ops.attend(q, k, v, bias, 0.35)
    assert out.shape == q.shape
    torch.testing.assert_close(out, oracles.attention(q, k, v, bias, 0.35), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, ops.attend(q, k, v, bias, 0.35), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["none", "mask", "channel"])
def test_gradcheck_attend(way: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 5, 3))
    if way == "none":
        assert torch.autograd.gradcheck(lambda q, k, v: ops.attend(q, k, v, None, 0.5), (q, k, v))
        return
    size = sizes(1, 5).requires_grad_(way == "channel")
    assert torch.autograd.gradcheck(lambda q, k, v, m: ops.attend(q, k, v, ops.log_size(m), 0.5), (q, k, v, size))


def test_log_size_has_a_floor() -> None:
    size = torch.tensor([[-1e-7, 0.0, SIZE_FLOOR / 2, 1.0, 4.0]], requires_grad=True)
    logs = ops.log_size(size)
    floor = math.log(SIZE_FLOOR)
    torch.testing.assert_close(logs, torch.tensor([[floor, floor, floor, 0.0, math.log(4.0)]]))
    logs.sum().backward()
    torch.testing.assert_close(size.grad, torch.tensor([[1 / SIZE_FLOOR] * 3 + [1.0, 0.25]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_size_zero_has_the_gradient_of_weighted_attention(dtype: torch.dtype) -> None:
    """Of Σ_j m_j exp(s_j) v_j / Σ_j m_j exp(s_j), which needs no logarithm: it does not vanish at m = 0."""
    q, k, v = qkv(dtype=dtype)
    size = sizes(dtype=dtype)
    size[:, 2:4] = 0.0
    weights = torch.randn_like(v)

    def literal(m: torch.Tensor) -> torch.Tensor:
        raised = m[:, None, None] * (0.5 * q @ k.mT).exp()
        return (raised @ v / raised.sum(dim=3, keepdim=True) * weights).sum()

    def ours(m: torch.Tensor) -> torch.Tensor:
        return (ops.attend(q, k, v, ops.log_size(m), 0.5) * weights).sum()

    expected, found = (torch.autograd.grad(run(m), m)[0] for run in (literal, ours) for m in [size.requires_grad_()])
    assert expected[:, 2:4].abs().min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_dropout_drops_attention() -> None:
    q, k, v = qkv()
    assert not torch.equal(ops.attend(q, k, v, None, 0.5, dropout=0.9), ops.attend(q, k, v, None, 0.5))


@pytest.mark.parametrize("with_sizes", [False, True])
def test_class_attention_is_the_first_row(with_sizes: bool) -> None:
    q, k, _ = qkv()
    bias = ops.log_size(sizes()) if with_sizes else None
    row = ops.class_attention(q, k, bias, 0.5)
    assert row.shape == (2, 2, 9)
    for token in range(9):  # values that single out one token turn the output into that token's weight
        one_hot = torch.zeros(2, 2, 9, 1, dtype=torch.float64)
        one_hot[:, :, token] = 1
        expected = oracles.attention(q, k, one_hot, bias, 0.5)[:, :, 0, 0]
        torch.testing.assert_close(row[:, :, token], expected, rtol=1e-10, atol=1e-12)
