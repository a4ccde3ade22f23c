"""Tiny pictures: the one of number n has n as its red value, so that a pixel tells which it is."""

import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image


def picture(number: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("RGB", size, (number, 0, 255 - number))


def encoded(number: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(number))


def class_folders(root: Path, count: int, classes: Iterable[str] = ("0", "1")) -> Path:
    """`count` pictures, dealt out to the class folders in turn."""
    names = list(classes)
    for number in range(count):
        write(root / names[number % len(names)] / f"{number:03d}.png", number)
    return root


def red(image: bytes | Image.Image) -> int:
    opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    value = opened.convert("RGB").getpixel((0, 0))
    assert isinstance(value, tuple)
    return int(value[0])
