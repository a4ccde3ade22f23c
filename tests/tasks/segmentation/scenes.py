"""Small made-up scenes with masks, in the layouts that the package reads."""

from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("a", "b", "c", "d", "e", "f")
CLASSES = """\
classes:
  - {name: sky, color: [10, 20, 200]}
  - {name: road, color: [90, 90, 90]}
  - {name: car, color: [200, 0, 0]}
ignore: [255, [0, 0, 0]]
"""
COLOURS = np.array([[10, 20, 200], [90, 90, 90], [200, 0, 0], [0, 0, 0]], np.uint8)


def scene(seed: int, size: tuple[int, int] = (32, 48)) -> tuple[np.ndarray, np.ndarray]:
    """Sky above road with a car on it, and a border of no class (3): pixels that tell the classes, and the classes."""
    random = np.random.default_rng(seed)
    mask = np.zeros(size, np.uint8)
    mask[size[0] // 2 :] = 1
    left = int(random.integers(4, size[1] // 2))
    mask[size[0] // 2 - 4 : size[0] // 2 + 6, left : left + 14] = 2
    mask[:, :2] = 3
    pixels = COLOURS[mask].astype(int) + random.integers(-20, 20, (*size, 3))
    return pixels.clip(0, 255).astype(np.uint8), mask


def write(images: Path, masks: Path, coloured: bool = False, offset: int = 0, ignored: int = 255) -> None:
    """Six scenes. In 8-bit masks class k is written k + offset."""
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        pixels, mask = scene(seed)
        Image.fromarray(pixels).save(images / f"{name}.png")
        if coloured:
            Image.fromarray(COLOURS[mask]).save(masks / f"{name}.png")
        else:
            values = np.where(mask == 3, ignored, mask + offset).astype(np.uint8)
            Image.fromarray(values).save(masks / f"{name}.png")


def folder(root: Path, coloured: bool = False) -> Path:
    """images, masks and classes.yaml."""
    write(root / "images", root / "masks", coloured)
    (root / "classes.yaml").write_text(CLASSES)
    return root
