"""Hard merge and unmerge."""

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtem import ops
from dtem.errors import DtemError

PREFIXES = pytest.mark.parametrize("prefix", [0, 1, 2, 5])


def assert_is_oracle(x: torch.Tensor, size: torch.Tensor, metric: torch.Tensor, r: int, prefix: int) -> None:
    matching = ops.match(metric, r, prefix)
    merged_x, merged_size = ops.merge(x, size, matching)
    for image in range(x.shape[0]):
        expected = oracles.merge(x[image], size[image], *oracles.match(metric[image], r, prefix))
        torch.testing.assert_close(merged_x[image], expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged_size[image], expected[1], rtol=1e-12, atol=1e-12)
        assert matching.source[image].tolist() == expected[2]


@PREFIXES
@pytest.mark.parametrize("patches", [2, 7, 10])
@pytest.mark.parametrize("batch", [1, 3])
def test_merge_is_the_loop(prefix: int, patches: int, batch: int) -> None:
    tokens = prefix + patches
    metric, x = torch.randn(2, batch, tokens, 4, dtype=torch.float64)
    size = 0.5 + 3 * torch.rand(batch, tokens, dtype=torch.float64)
    for r in range(ops.limit(patches) + 1):
        assert_is_oracle(x, size, metric, r, prefix)


@PREFIXES
def test_everything_into_one(prefix: int) -> None:
    """All A tokens like the same B token best: one group holds them all."""
    tokens = prefix + 8
    metric = torch.randn(1, tokens, 3, dtype=torch.float64)
    side_a, side_b = oracles.split(tokens, prefix)
    metric[0, side_a] = metric[0, side_b[1]].clone()
    x, size = torch.randn(1, tokens, 3, dtype=torch.float64), torch.rand(1, tokens, dtype=torch.float64) + 1
    assert_is_oracle(x, size, metric, 4, prefix)
    assert ops.match(metric, 4, prefix).into.unique().numel() == 1


def test_no_sizes_means_ones() -> None:
    x, matching = torch.randn(2, 9, 4), ops.match(torch.randn(2, 9, 4), 3, 1)
    implicit, explicit = ops.merge(x, None, matching), ops.merge(x, torch.ones(2, 9), matching)
    torch.testing.assert_close(implicit, explicit, rtol=0, atol=0)
    assert implicit[1].dtype == torch.float32


def test_merge_leaves_its_inputs_alone() -> None:
    x, size = torch.randn(2, 9, 4), torch.rand(2, 9)
    before = x.clone(), size.clone()
    ops.merge(x, size, ops.match(x, 4, 1))
    assert torch.equal(x, before[0])
    assert torch.equal(size, before[1])


@PREFIXES
@pytest.mark.parametrize("patches", [2, 3, 10, 11])
@pytest.mark.parametrize("batch", [1, 3])
def test_round_trips(prefix: int, patches: int, batch: int) -> None:
    x = torch.randn(batch, prefix + patches, 4)
    for r in range(ops.limit(patches) + 1):
        assert_round_trip(x, r, prefix)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_round_trips_for_any_shape(data: st.DataObject) -> None:
    prefix, patches = data.draw(st.integers(0, 6)), data.draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = (data.draw(st.integers(1, 4)), prefix + patches, data.draw(st.integers(1, 8)))
    assert_round_trip(torch.randn(shape, generator=generator), data.draw(st.integers(0, patches // 2)), prefix)


def assert_round_trip(x: torch.Tensor, r: int, prefix: int) -> None:
    batch, tokens, _ = x.shape
    matching = ops.match(x + 1, r, prefix)  # + 1: not the same directions as what is merged
    y, size = ops.merge(x, None, matching)
    assert y.shape == (batch, tokens - r, x.shape[2])
    torch.testing.assert_close(size.sum(dim=1), torch.full((batch,), float(tokens)))

    back = ops.unmerge(y, matching)
    assert back.shape == x.shape
    assert torch.equal(back[:, :prefix], x[:, :prefix])
    for image in range(batch):
        groups: dict[int, list[int]] = {}
        for token, out in enumerate(matching.source[image].tolist()):
            groups.setdefault(out, []).append(token)
        assert sorted(groups) == list(range(tokens - r))
        for out, members in groups.items():
            assert size[image, out] == len(members)
            if len(members) == 1:
                assert torch.equal(back[image, members[0]], x[image, members[0]])
            for member in members:
                assert torch.equal(back[image, member], y[image, out])
    again, _ = ops.merge(back, None, matching)
    assert torch.equal(again, y)


def test_unmerge_takes_a_composed_source() -> None:
    """Two merges undone at once by their source map are the two undone one by one."""
    x = torch.randn(2, 17, 4)
    first = ops.match(x, 5, 1)
    y, size = ops.merge(x, None, first)
    second = ops.match(y, 4, 1)
    z, _ = ops.merge(y, size, second)
    stepwise = ops.unmerge(ops.unmerge(z, second), first)
    assert torch.equal(ops.unmerge(z, ops.compose(first.source, second.source)), stepwise)


@PREFIXES
@pytest.mark.parametrize("tokens", [21, 40])
def test_sizes_sum_to_n_down_to_the_last_patch(prefix: int, tokens: int) -> None:
    x, size = torch.randn(3, tokens, 4), None
    mean = x[:, prefix:].mean(dim=1)
    while x.shape[1] - prefix > 1:
        x, size = ops.merge(x, size, ops.match(x, ops.limit(x.shape[1] - prefix), prefix))
        torch.testing.assert_close(size.sum(dim=1), torch.full((3,), float(tokens)))
        assert torch.equal(size[:, :prefix], torch.ones(3, prefix))
    assert size[:, prefix].tolist() == [float(tokens - prefix)] * 3
    torch.testing.assert_close(x[:, prefix], mean, msg="what is left is the mean of all patches")


def test_gradcheck_merge() -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    size = (0.5 + torch.rand(2, 7, dtype=torch.float64)).requires_grad_()
    for prefix in (0, 1):
        matching = ops.match(torch.randn(2, 7, 4, dtype=torch.float64), 3, prefix)
        assert torch.autograd.gradcheck(lambda x, size, matching=matching: ops.merge(x, size, matching), (x, size))


def test_a_matching_for_other_tokens_is_refused() -> None:
    matching = ops.match(torch.randn(1, 9, 4), 2, 1)
    with pytest.raises(DtemError, match="for 9 tokens, x has 8"):
        ops.merge(torch.randn(1, 8, 4), None, matching)
