"""Tokens on foreground and background, against counting by hand."""

import numpy as np
import pytest

from dtem.errors import DtemError
from dtem.visualise.allocation import allocate, by_attention, by_mask


def test_tokens_are_shared_out_by_patch() -> None:
    # Token 5 holds two foreground patches and one of the background, token 7 one patch, token 9 two of the background.
    source = np.array([5, 5, 5, 7, 9, 9])
    foreground = np.array([True, True, False, True, False, False])
    allocation = allocate(source, foreground)
    assert allocation.foreground_tokens == pytest.approx(2 / 3 + 1)
    assert allocation.background_tokens == pytest.approx(1 / 3 + 1)
    assert (allocation.foreground_patches, allocation.background_patches) == (3, 3)
    assert allocation.share == pytest.approx((5 / 3) / 3)
    assert allocation.even == 0.5


def test_without_merging_the_share_is_even() -> None:
    foreground = np.arange(16) < 5
    allocation = allocate(np.arange(16), foreground)
    assert allocation.share == pytest.approx(allocation.even) == 5 / 16


def test_dropped_patches_have_no_token() -> None:
    allocation = allocate(np.array([-1, -1, 3, 3]), np.array([True, False, True, True]))
    assert (allocation.foreground_dropped, allocation.background_dropped) == (1, 1)
    assert (allocation.foreground_tokens, allocation.background_tokens) == (1.0, 0.0)
    assert allocate([-1, -1], [True, False]).share == 0


def test_parts_make_all_tokens() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        source = random.integers(-1, 9, 30)
        allocation = allocate(source, random.random(30) < 0.4)
        assert allocation.foreground_tokens + allocation.background_tokens == pytest.approx(
            len(set(source.tolist()) - {-1})
        )


def test_a_patch_is_foreground_by_half() -> None:
    mask = np.zeros((4, 6))
    mask[:2, :1] = 1  # half of the first patch
    mask[2:, 4] = 1
    mask[2, 4] = 0  # a quarter of the last
    assert by_mask(mask, (2, 3)).tolist() == [True, False, False, False, False, False]


def test_attention_above_the_mean_is_foreground() -> None:
    assert by_attention([0.1, 0.1, 0.5, 0.3]).tolist() == [False, False, True, True]


def test_shapes_must_fit() -> None:
    with pytest.raises(DtemError, match=r"\(3,\).*\(2,\)"):
        allocate([1, 2, 3], [True, False])
    with pytest.raises(DtemError, match="3 × 3"):
        by_mask(np.zeros((4, 4)), (3, 3))
