import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtem import ops
from dtem.errors import DtemError


def assert_is_oracle(metric: torch.Tensor, r: int, prefix: int) -> None:
    matching = ops.match(metric, r, prefix)
    for image in range(metric.shape[0]):
        kept, merged, partner = oracles.match(metric[image], r, prefix)
        assert matching.kept[image].tolist() == kept
        assert matching.merged[image].tolist() == merged
        assert matching.kept[image][matching.into[image]].tolist() == partner


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("patches", [2, 3, 8, 9])
def test_match_is_the_loop(prefix: int, patches: int) -> None:
    metric = torch.randn(3, prefix + patches, 6, dtype=torch.float64)
    for r in range(ops.limit(patches) + 1):
        assert_is_oracle(metric, r, prefix)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_match_is_the_loop_for_any_shape(data: st.DataObject) -> None:
    prefix, patches = data.draw(st.integers(0, 6)), data.draw(st.integers(2, 24))
    r, seed = data.draw(st.integers(0, patches // 2)), data.draw(st.integers(0, 2**31))
    metric = torch.randn(
        data.draw(st.integers(1, 3)),
        prefix + patches,
        data.draw(st.integers(2, 9)),
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
    assert_is_oracle(metric, r, prefix)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("patches", [4, 15, 40])
def test_ties_go_to_the_lower_index(prefix: int, patches: int) -> None:
    """Vectors of four ±1 have cosines in {−1, −½, 0, ½, 1}, all exact: there are ties on every side."""
    signs = torch.randint(0, 2, (3, prefix + patches, 4)).float() * 2 - 1
    for r in range(ops.limit(patches) + 1):
        assert_is_oracle(signs, r, prefix)


@pytest.mark.parametrize("tokens", [11, 197])
def test_all_alike_merges_the_first_into_the_first(tokens: int) -> None:
    matching = ops.match(torch.ones(2, tokens, 16), 4, 1)
    assert matching.merged.tolist() == [[2, 4, 6, 8]] * 2
    assert matching.kept.gather(1, matching.into).tolist() == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(("tokens", "prefix"), [(1, 1), (1, 0), (3, 2), (6, 5)])
def test_nothing_to_match_with(tokens: int, prefix: int) -> None:
    """No patches, or only one: r = 0 is the only choice, and it keeps everything."""
    matching = ops.match(torch.randn(2, tokens, 4), 0, prefix)
    assert matching.kept.tolist() == [list(range(tokens))] * 2
    assert matching.merged.shape == matching.into.shape == (2, 0)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("r", [-1, 5, 1000])
def test_impossible_r_is_refused_by_name(prefix: int, r: int) -> None:
    metric = torch.randn(1, prefix + 9, 4)
    with pytest.raises(DtemError, match=rf"r = {r} .*9 patches.*0 to 4"):
        ops.match(metric, r, prefix)


def test_zero_vectors_match_without_nan() -> None:
    metric = torch.zeros(1, 9, 4)
    assert ops.cosine(metric, 1).tolist() == torch.zeros(1, 4, 4).tolist()
    assert ops.match(metric, 2, 1).merged.tolist() == [[2, 4]]


def test_cosine_sides_are_by_absolute_position() -> None:
    """With an odd prefix the first patch is at an odd position, hence on side B."""
    z = torch.randn(1, 8, 3, dtype=torch.float64)
    for prefix in range(4):
        for excluded in (0, 1, 2):
            similarity = ops.cosine(z, prefix, excluded)[0]
            side_a, side_b = oracles.split(8 - excluded, prefix)
            expected = [[oracles.cosine(z[0, a].tolist(), z[0, b].tolist()) for b in side_b] for a in side_a]
            torch.testing.assert_close(similarity, torch.tensor(expected, dtype=torch.float64))


def test_compose_follows_a_patch_through_merges() -> None:
    tokens, prefix = 14, 2
    source = torch.arange(prefix, tokens).expand(2, -1)
    groups = [[{patch} for patch in range(tokens)] for _ in range(2)]
    left = tokens
    for r in (4, 3, 2):
        matching = ops.match(torch.randn(2, left, 5), r, prefix)
        source = ops.compose(source, matching.source)
        for image in range(2):
            merged: list[set[int]] = [set() for _ in range(left - r)]
            for token, out in enumerate(matching.source[image].tolist()):
                merged[out] |= groups[image][token]
            groups[image] = merged
        left -= r
    for image in range(2):
        for patch in range(prefix, tokens):
            assert patch in groups[image][source[image, patch - prefix]]
