"""The layout of a sheet: nothing covers anything else."""

import numpy as np
import pytest
from PIL import Image

from dtem.errors import DtemError
from dtem.visualise import style
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


def test_rows_may_end_earlier_and_a_legend_stands_below() -> None:
    names = [(f"a class with a long name {index}", (0, 10 * index, 200)) for index in range(9)]
    drawn = sheet([colours(10), colours(30, 40)], ["unmerged", "tome, r = 4"], [["a"], ["b", "c"]], names)
    plain = sheet([colours(10), colours(30, 40)], ["unmerged", "tome, r = 4"], [["a"], ["b", "c"]])
    assert drawn.width == plain.width
    assert drawn.crop((0, 0, plain.width, plain.height)).tobytes() == plain.tobytes()
    below = np.asarray(drawn)[plain.height :]
    corners = [np.argwhere((below == colour).all(axis=2)).min(axis=0) for _, colour in names]
    assert len({tuple(corner) for corner in corners}) == 9
    assert max(corner[1] for corner in corners) < drawn.width - 100, "names are inside of the sheet"


def test_headings_have_the_colours_of_their_methods() -> None:
    pixels = np.asarray(sheet([colours(1), colours(2)], ["tome, r = 4", "dtem, r = 4"], [[""], [""]]))
    for method in ("tome", "dtem"):
        assert (pixels == style.colour(method).rgb).all(axis=2).any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DtemError, match="make no sheet"):
        sheet([colours(1), [Image.new("RGB", (5, 5))]], ["", ""], [[""], [""]])
    with pytest.raises(DtemError, match="make no sheet"):
        sheet([colours(1)], [""], [["one", "two"]])
