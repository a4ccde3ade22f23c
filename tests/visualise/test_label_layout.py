"""Places of labels."""

import numpy as np

from dtem.visualise.label_layout import LabelLayout, along, around, overlaps

EMPTY = np.empty((0, 4))


def test_a_label_stands_beside_its_anchor() -> None:
    box = LabelLayout((0, 0, 100, 100), EMPTY, EMPTY).place([(50, 50)], (20, 10))
    assert box is not None
    assert box[3] <= 50 - 6  # below
    above = LabelLayout((0, 0, 100, 100), EMPTY, EMPTY).place([(50, 50)], (20, 10), above=True)
    assert above is not None
    assert above[1] >= 50 + 6


def test_labels_go_where_nothing_is() -> None:
    marker = around(np.array([[50.0, 40.0]]), 10)
    layout = LabelLayout((0, 0, 100, 100), marker, along(np.array([[50.0, 50.0], [100.0, 50.0]])))
    boxes = [layout.place([(50, 50)], (20, 10)) for _ in range(4)]
    placed = np.array([box for box in boxes if box is not None])
    assert len(placed) >= 3
    assert not np.triu(overlaps(placed, placed), 1).any()
    assert not overlaps(placed, marker).any()


def test_where_there_is_no_room() -> None:
    full = LabelLayout((0, 0, 100, 100), np.array([[0.0, 0.0, 100.0, 70.0]]), EMPTY)
    assert full.place([(50, 30)], (20, 10)) is None
    anywhere = full.place([(50, 30)], (20, 10), anywhere=True)
    assert anywhere is not None
    assert anywhere[1] >= 70
    assert full.place([(50, 30)], (200, 10), anywhere=True) is None
