"""Places for the labels of a plot, so that no label covers another one. Pure geometry, in pixels."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

Box = Float[np.ndarray, "4"]
"""Left, bottom, right, top."""

_DIRECTIONS = np.array([(0, -1), (0, 1), (1, 0), (-1, 0), (1, -1), (-1, -1), (1, 1), (-1, 1)], dtype=float)
"""From the anchor to the label, the preferred ones first."""
PAD = 2.0
"""Pixels that stay free around a label."""


class LabelLayout:
    """Labels that are placed one after the other.

    Args:
        frame: labels stay inside of it.
        taken: boxes that no label may cover, such as markers.
        avoided: boxes that labels cover only if they must, such as pieces of lines.
    """

    def __init__(
        self, frame: Sequence[float], taken: Float[np.ndarray, "n 4"], avoided: Float[np.ndarray, "m 4"]
    ) -> None:
        self.frame = np.asarray(frame, dtype=float)
        self.taken, self.avoided = taken, avoided

    def avoid(self, boxes: Float[np.ndarray, "k 4"]) -> None:
        """More boxes that labels cover only if they must."""
        self.avoided = np.concatenate([self.avoided, boxes])

    def place(
        self,
        anchors: Sequence[tuple[float, float]],
        size: tuple[float, float],
        distances: Sequence[float] = (6,),
        *,
        above: bool = False,
        anywhere: bool = False,
    ) -> Box | None:
        """The best free box of that size around one of the anchors; None if there is none.

        Args:
            anchors: points that the label may stand beside, the preferred ones first.
            size: width and height of the label.
            distances: from the anchor to the nearest edge of the label, the preferred ones first.
            above: rather above the anchor than below it.
            anywhere: where all of these are taken, take the nearest free place of the whole frame.
        """
        half = np.asarray(size, dtype=float) / 2 + PAD
        directions = _DIRECTIONS * (1, -1 if above else 1)
        middles = [np.asarray(anchor) + directions * (half + away) for away in distances for anchor in anchors]
        places = np.asarray(anchors, dtype=float)
        best = self._best(np.concatenate(middles), half, places, above)
        if best is None and anywhere:
            left, bottom, right, top = self.frame
            columns, rows = np.meshgrid(np.arange(left, right, 8.0), np.arange(bottom, top, 4.0))
            grid = np.stack([columns.ravel(), rows.ravel()], axis=1)
            best = self._best(grid, half, places, above)
        if best is not None:
            self.taken = np.concatenate([self.taken, best[None]])
        return best

    def _best(
        self,
        middles: Float[np.ndarray, "k 2"],
        half: Float[np.ndarray, "2"],
        anchors: Float[np.ndarray, "a 2"],
        above: bool,
    ) -> Box | None:
        boxes = np.concatenate([middles - half, middles + half], axis=1)
        inside = (boxes[:, :2] >= self.frame[:2]).all(axis=1) & (boxes[:, 2:] <= self.frame[2:]).all(axis=1)
        free = inside & ~overlaps(boxes, self.taken).any(axis=1)
        if not free.any():
            return None
        covered = overlaps(boxes, self.avoided).sum(axis=1)
        distances = np.abs(middles[:, None] - anchors).max(axis=2)
        nearest = distances.argmin(axis=1)
        beyond = np.sign(middles[:, 1] - anchors[nearest, 1]) != (1 if above else -1)
        cost = 8.0 * covered + distances.min(axis=1) + 12.0 * beyond + 0.01 * np.arange(len(boxes)) + 2.0 * nearest
        cost = np.where(free, cost, np.inf)
        best: Box = boxes[int(cost.argmin())]
        return best


def overlaps(boxes: Float[np.ndarray, "k 4"], others: Float[np.ndarray, "n 4"]) -> Bool[np.ndarray, "k n"]:
    """Which boxes overlap which others."""
    a, b = boxes[:, None], others[None]
    return np.logical_and.reduce((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:]), axis=2)


def along(points: Float[np.ndarray, "n 2"], side: float = 5.0) -> Float[np.ndarray, "m 4"]:
    """A line through points as boxes of that side."""
    pieces = [np.empty((0, 2))]
    for start, end in itertools.pairwise(points):
        steps = max(2, int(np.abs(end - start).max() / side) + 1)
        pieces.append(start + (end - start) * np.linspace(0, 1, steps)[:, None])
    return around(np.concatenate(pieces), side)


def around(points: Float[np.ndarray, "n 2"], side: float) -> Float[np.ndarray, "n 4"]:
    """A box around each point."""
    return np.concatenate([points - side / 2, points + side / 2], axis=1)
