"""Masks over images."""

import numpy as np
import pytest

from dtem.errors import DtemError
from dtem.visualise.masks import overlay

COLOURS = ((200, 0, 0), (0, 100, 0))


def test_colours_are_mixed_where_there_is_a_class() -> None:
    pixels = np.full((2, 3, 3), 100, np.uint8)
    tinted = np.asarray(overlay(pixels, np.array([[0, 1, -1], [1, -1, 0]]), COLOURS))
    assert tinted[0, 0].tolist() == [160, 40, 40]
    assert tinted[0, 1].tolist() == [40, 100, 40]
    assert tinted[0, 2].tolist() == [100, 100, 100]


def test_what_does_not_fit_is_refused() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(DtemError, match="cannot be covered"):
        overlay(pixels, np.zeros((3, 2), int), COLOURS)
    with pytest.raises(DtemError, match="class 2, and there are 2"):
        overlay(pixels, np.full((2, 2), 2), COLOURS)
