"""The classes of a segmentation dataset: names, values and colours in masks.

A mask is an 8-bit image of class values (also with a palette), or an RGB image of class colours. A YAML file lists the
classes:

    classes:
      - {name: road, color: [128, 64, 128]}     # color: needed for masks in colours
      - {name: car, value: 7}                   # value in 8-bit masks; default: the position in the list, from 0
    ignore: [255, [0, 0, 0]]                    # values or colours of no class
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtem.errors import DtemError
from dtem.files import read_yaml

if TYPE_CHECKING:
    from PIL import Image

IGNORE = -1
"""The class of an ignored pixel in a decoded mask."""
_OUTSIDE = -2
Colour = tuple[int, int, int]
Mask = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Classes:
    """Classes of a dataset."""

    names: tuple[str, ...]
    values: tuple[int, ...]
    """Value of each class in 8-bit masks."""
    ignore: frozenset[int] = frozenset()
    """Ignored values."""
    colours: tuple[Colour, ...] = ()
    """Colour of each class, in masks and in pictures; empty: pictures use default colours."""
    ignore_colours: frozenset[Colour] = frozenset()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def drawn(self) -> tuple[Colour, ...]:
        """The colour of each class in pictures."""
        return self.colours or tuple(default_colour(index + 1) for index in range(len(self)))

    def read(self, mask: "Image.Image", name: str) -> Mask:
        """The class of each pixel, `IGNORE` for ignored values. Unknown values are refused."""
        if mask.mode in ("P", "L", "1", "I", "I;16"):
            return self._from_values(np.asarray(mask), name)
        return self._from_colours(np.asarray(mask.convert("RGB")), name)

    def _from_values(self, pixels: Mask, name: str) -> Mask:
        table = np.full(65536, _OUTSIDE, np.int16)
        table[list(self.ignore)] = IGNORE
        table[list(self.values)] = np.arange(len(self))
        classes: Mask = table[pixels.astype(np.uint16)]
        if (outside := classes == _OUTSIDE).any():
            value = int(pixels[outside][0])
            raise DtemError(
                f"the mask {name} has the value {value}, which is none of the {len(self)} classes "
                f"({_ranges(self.values)}), nor one to ignore ({_ranges(self.ignore) or 'there is none'}): correct "
                "the mask or the list of classes"
            )
        return classes

    def _from_colours(self, pixels: Mask, name: str) -> Mask:
        if not self.colours:
            raise DtemError(f"the mask {name} is in colours, and the classes have none: give each a color in the YAML")
        codes = _code(pixels)
        classes = np.full(codes.shape, _OUTSIDE, np.int16)
        for index, colour in (*((IGNORE, each) for each in self.ignore_colours), *enumerate(self.colours)):
            classes[codes == _code(np.array(colour))] = index
        if (outside := classes == _OUTSIDE).any():
            colour = tuple(pixels[outside][0].tolist())
            raise DtemError(f"the mask {name} has the colour {colour}, which is none of the {len(self)} classes")
        return classes


def _code(pixels: Mask) -> Any:
    return (pixels.astype(np.int32) * np.array([65536, 256, 1])).sum(-1)


def default_colour(index: int) -> Colour:
    """The colour map of Pascal VOC: bit 3k + c of the index is bit 7 − k of channel c."""
    channels = [0, 0, 0]
    for k in range(8):
        for c in range(3):
            channels[c] |= (index >> (3 * k + c) & 1) << (7 - k)
    return channels[0], channels[1], channels[2]


VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CAMVID = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)


def voc() -> Classes:
    """Pascal VOC: background is a class, the border around objects (255) is ignored."""
    colours = tuple(default_colour(index) for index in range(21))
    return Classes(VOC, tuple(range(21)), frozenset({255}), colours, frozenset({(224, 224, 192)}))


def camvid() -> Classes:
    """CamVid in its usual 11 classes."""
    return Classes(CAMVID, tuple(range(11)), frozenset({11, 255}))


def ade20k(root: Path) -> Classes:
    """ADE20K: 150 classes with values 1 to 150; 0 is ignored. Names are in objectInfo150.txt."""
    table = root / "objectInfo150.txt"
    names = [f"class {value}" for value in range(1, 151)]
    if table.is_file():
        rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
        if len(rows) != 150:
            raise DtemError(f"{table} has {len(rows)} classes, not 150")
        names = [row[-1].split(",")[0].strip() for row in rows]
    return Classes(tuple(names), tuple(range(1, 151)), frozenset({0}))


def named_classes(labels: object) -> Classes | None:
    """Classes by name: camvid, voc, or a YAML file; None stays None."""
    if labels is None:
        return None
    if not isinstance(labels, str | os.PathLike):
        raise DtemError(f"labels = {labels!r} must be camvid, voc, or a YAML file of classes for a Segmenter")
    name, known = os.fspath(labels), {"camvid": camvid, "voc": voc}
    if name in known:
        return known[name]()
    if not Path(name).is_file():
        raise DtemError(f"labels = {name!r}: give camvid, voc, or a YAML file of classes (docs/tasks.md)")
    return from_yaml(Path(name))


def from_yaml(path: Path) -> Classes:
    """The classes of a YAML file."""
    content = read_yaml(path)
    listed = content.get("classes") if isinstance(content, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise DtemError(f"{path} must hold a list under classes:, each with a name (and a color, a value)")
    names, values, colours = [], [], []
    for position, entry in enumerate(listed):
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, Mapping) or "name" not in entry or entry.keys() - {"name", "color", "value"}:
            raise DtemError(
                f"{path}: class {position} is {entry!r}; write {{name: road, color: [128, 64, 128], value: 0}}"
            )
        names.append(str(entry["name"]))
        values.append(_value(entry.get("value", position), path))
        if "color" in entry:
            colours.append(_colour(entry["color"], path))
    ignored = content.get("ignore", [])
    ignored = ignored if isinstance(ignored, list) else [ignored]
    plain = frozenset(_value(each, path) for each in ignored if not isinstance(each, list))
    coloured = frozenset(_colour(each, path) for each in ignored if isinstance(each, list))
    if colours and len(colours) != len(names):
        raise DtemError(f"{path}: {len(colours)} of {len(names)} classes have a color; give it to all or to none")
    for field, entries in (("name", names), ("value", [*values, *plain]), ("color", [*colours, *coloured])):
        if repeated := [each for position, each in enumerate(entries) if each in entries[:position]]:
            raise DtemError(f"{path}: the {field} {repeated[0]} is there twice")
    return Classes(tuple(names), tuple(values), plain, tuple(colours), coloured)


def _value(value: object, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 65536:
        raise DtemError(f"{path}: {value!r} is not a value of a mask; give a whole number from 0 on")
    return value


def _colour(value: object, path: Path) -> Colour:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, int) and 0 <= v < 256 for v in value):
        raise DtemError(f"{path}: {value!r} is not a colour; write three numbers from 0 to 255")
    return value[0], value[1], value[2]


def _ranges(values: Any) -> str:
    """Whole numbers as ranges: ``0 to 10, 12``."""
    ordered, parts = sorted(values), []
    while ordered:
        length = next((n for n in range(1, len(ordered)) if ordered[n] != ordered[0] + n), len(ordered))
        parts.append(str(ordered[0]) if length == 1 else f"{ordered[0]} to {ordered[length - 1]}")
        ordered = ordered[length:]
    return ", ".join(parts)
