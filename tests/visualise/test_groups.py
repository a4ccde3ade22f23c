"""Pictures of merged groups, on maps small enough to draw by hand."""

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from dtem.errors import DtemError
from dtem.visualise import groups

BLACK, WHITE = (0, 0, 0), (255, 255, 255)


@pytest.fixture
def no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours only: on patches of one pixel there is no room for lines."""
    monkeypatch.setattr(groups, "_borders", lambda label: np.zeros(label.shape, dtype=bool))


def grey_image() -> np.ndarray:
    """2×2 patches of 2×2 pixels with the values 10, 20 / 30, 41."""
    return np.array([[10, 20], [30, 41]], dtype=np.uint8).repeat(2, axis=0).repeat(2, axis=1)


def test_groups_take_their_mean_colour(no_lines: None) -> None:
    drawn = np.asarray(groups.draw_groups(grey_image(), [5, 5, 9, 5], (2, 2), scale=1))
    assert drawn.shape == (4, 4, 3)
    assert drawn[0, 0, 0] == drawn[0, 3, 0] == drawn[3, 3, 0] == round((10 + 20 + 41) / 3)
    assert (drawn[2:, :2] == 30).all()


def test_means_are_over_pixels_and_by_channel(no_lines: None) -> None:
    image = np.zeros((2, 4, 3), dtype=np.uint8)
    image[:, 0] = (40, 0, 8)  # one of the two pixel columns of the left patch
    image[:, 2:] = (100, 50, 8)
    drawn = np.asarray(groups.draw_groups(image, [0, 1], (1, 2), scale=1))
    assert drawn[0, 0].tolist() == drawn[1, 1].tolist() == [20, 0, 4]
    assert drawn[0, 2].tolist() == [100, 50, 8]
    together = np.asarray(groups.draw_groups(image, [3, 3], (1, 2), scale=1))
    assert (together == [60, 25, 6]).all()


def test_lines_run_where_groups_meet_and_nowhere_else() -> None:
    drawn = np.asarray(groups.draw_groups(np.zeros((4, 4), np.uint8), [0, 0, 0, 1], (2, 2), scale=2))
    red = (drawn == groups.LINE).all(axis=2)
    expected = np.zeros((8, 8), dtype=bool)
    expected[3, 4:] = expected[4, 4:] = True  # above the lower right patch, on either side
    expected[4:, 3] = expected[4:, 4] = True  # to its left
    assert (red == expected).all()


def test_one_group_has_no_lines() -> None:
    drawn = groups.draw_groups(np.zeros((4, 4), np.uint8), [7] * 4, (2, 2))
    assert drawn.getcolors() == [(drawn.width * drawn.height, BLACK)]


def test_far_patches_of_one_group_share_the_colour(no_lines: None) -> None:
    image = np.array([[0, 90, 30]], dtype=np.uint8)
    drawn = np.asarray(groups.draw_groups(image, [2, 0, 2], (1, 3), scale=1))
    assert drawn[0, :, 0].tolist() == [15, 90, 15]


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 1), (4, 4, 3)])
def test_grey_and_colour_bytes_and_floats_agree(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    source = torch.tensor([0, 1, 1, 2])
    drawn = groups.draw_groups(image, source, (2, 2))
    assert drawn.mode == "RGB"
    assert drawn.tobytes() == groups.draw_groups(image / 255, source, (2, 2)).tobytes()
    assert drawn.tobytes() == groups.draw_groups(Image.fromarray(image.squeeze()), source, (2, 2)).tobytes()


def test_scale_leaves_room_for_lines() -> None:
    assert groups.draw_groups(np.zeros((28, 28), np.uint8), np.arange(196), (14, 14)).size == (168, 168)
    assert groups.draw_groups(np.zeros((224, 224, 3), np.uint8), np.arange(196), (14, 14)).size == (224, 224)
    assert groups.default_scale((28, 28), (14, 14)) == 6
    assert groups.plain(np.zeros((28, 28), np.uint8), scale=6).size == (168, 168)


def test_oblong_grids(no_lines: None) -> None:
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    drawn = np.asarray(groups.draw_groups(image, np.arange(6), (2, 3), scale=1))
    assert (drawn[..., 0] == image).all()


def test_dropped_patches_are_dimmed_and_hatched_and_share_no_colour() -> None:
    image = np.array([[100, 200, 50, 90]], dtype=np.uint8).repeat(12, axis=0).repeat(12, axis=1)
    drawn = np.asarray(groups.draw_groups(image, [-1, -1, 4, 4], (1, 4), scale=1))
    for y in range(12):
        for x in range(48):
            colour = drawn[y, x].tolist()
            if x in (23, 24):  # where dropped patches meet the others; between the two dropped ones there is no line
                assert colour == list(groups.LINE)
            elif x > 24:
                assert colour == [70] * 3  # (50 + 90) / 2, neither dimmed nor hatched
            elif (x + y) % groups.STRIDE == 0:
                assert colour == list(groups.HATCH)
            else:
                assert colour == [30 if x < 12 else 60] * 3  # 0.3 of its own brightness, not of the two's mean


def test_figure_holds_the_pictures_and_their_captions() -> None:
    pictures = [[Image.new("RGB", (3, 3), BLACK), Image.new("RGB", (3, 3), WHITE)]]
    root = ElementTree.fromstring(groups.figure(pictures, ["a < b"], ["block 1", "block 2"]))
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert texts == ["block 1", "block 2", "a < b"]
    links = [element.attrib["href"] for element in root if element.tag.endswith("image")]
    first, second = (Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))) for link in links)
    assert (first.getpixel((0, 0)), second.getpixel((2, 2))) == (BLACK, WHITE)


@pytest.mark.parametrize(
    ("image", "source", "grid", "named"),
    [
        (np.zeros((4, 4), np.uint8), [0, 1, 2], (2, 2), r"\(3,\).*2 × 2"),
        (np.zeros((5, 4), np.uint8), [0] * 4, (2, 2), "5 × 4 pixels"),
        (np.zeros((4, 4, 2), np.uint8), [0] * 4, (2, 2), r"\(4, 4, 2\)"),
        (np.zeros((4, 4), np.int64), [0] * 4, (2, 2), "int64"),
    ],
)
def test_what_does_not_fit_is_named(image: np.ndarray, source: list[int], grid: tuple[int, int], named: str) -> None:
    with pytest.raises(DtemError, match=named):
        groups.draw_groups(image, source, grid)


def test_captions_must_fit() -> None:
    with pytest.raises(DtemError, match="1 × 2 captions"):
        groups.figure([[Image.new("RGB", (1, 1))]], ["row"], ["one", "two"])
