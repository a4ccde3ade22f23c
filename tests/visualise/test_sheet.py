"""The layout of a sheet: nothing covers anything else."""

import numpy as np
import pytest
from PIL import Image

from dtem.errors import DtemError
from dtem.visualise.sheet import sheet


def colours(*values: int) -> list[Image.Image]:
    return [Image.new("RGB", (40, 30), (value, 0, 0)) for value in values]


def test_every_picture_is_there_whole() -> None:
    drawn = sheet([colours(10, 20), colours(30, 40)], ["first", "second"], [["a", "b\nc"], ["a very long caption", ""]])
    pixels = np.asarray(drawn)
    for value in (10, 20, 30, 40):
        rows, columns = np.nonzero((pixels == (value, 0, 0)).all(axis=2))
        assert (np.ptp(rows) + 1, np.ptp(columns) + 1, len(rows)) == (30, 40, 1200)


def test_long_captions_widen_the_columns() -> None:
    narrow = sheet([colours(1, 2)], [""], [["a", "b"]])
    wide = sheet([colours(1, 2)], [""], [["a caption that is much wider than its picture", "b"]])
    assert wide.width > narrow.width + 100


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DtemError, match="make no sheet"):
        sheet([colours(1), [Image.new("RGB", (5, 5))]], ["", ""], [[""], [""]])
