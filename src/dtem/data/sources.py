"""Image datasets. `open_source` opens one by its spec:

    DIR                              class folders, or images alone (unlabelled)
    timm:folder/DIR, timm:hfds/NAME  a reader of timm; ``#split``, ``?root=DIR`` for those that need one
    hf:NAME, hf-stream:NAME          Hugging Face datasets, a local folder or a name; ``#split``, ``?image=…&label=…``
    wds:DIR/train-{0000..0003}.tar   WebDataset shards; also a glob, or a folder of them

A source is either read by index or streamed. It returns encoded images; the loader decodes them in its workers.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from dtem.errors import DtemError

if TYPE_CHECKING:
    from PIL import Image

UNLABELLED = -1
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
SCHEMES = ("timm", "hf", "hf-stream", "wds")
_FORMS = "timm:READER, hf:NAME, hf-stream:NAME, wds:SHARDS"
_SPLITS = {"train", "val", "valid", "validation", "test"}


class Record(NamedTuple):
    """One image of a source."""

    image: "bytes | Image.Image | Any"
    """The encoded file, or the image where a library has decoded it already; or anything else that the transform takes
    (an image with its mask), with a `load` that decodes it."""
    label: int
    """Index of the class, `UNLABELLED` where there is none."""
    name: str
    """The same in every run, e.g. the path below the root."""


class Source:
    """An image dataset: read by index where `length` is a number, streamed where it is None."""

    def __init__(self, spec: str, labelled: bool, length: int | None) -> None:
        self.spec = spec
        self.labelled = labelled
        self.length = length

    def read(self, index: int) -> Record:
        """The image at `index`. An image that cannot be read raises an error of whatever kind."""
        raise TypeError(f"{self.spec} is a stream")

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        """All images, in an order that depends on seed and epoch alone; as they are stored where `seed` is None.

        Every process reads the whole stream and decodes its own part of it, so that parts do not depend on shards.
        """
        raise TypeError(f"{self.spec} is read by index")

    @property
    def names(self) -> Sequence[str] | None:
        """Name of each image by index, where known without reading images."""
        return None

    @property
    def labels(self) -> Sequence[int] | None:
        """Label of each image by index, where known without reading images."""
        return None

    @property
    def files(self) -> Sequence[str]:
        """Local files that hold the images: the dataset has changed when one of them has."""
        return ()

    def name(self, index: int) -> str:
        """Name of the image at `index` for messages, even if it cannot be read."""
        return self.names[index] if self.names is not None else f"image {index} of {self.spec}"


def open_source(spec: str) -> Source:
    """Open the dataset of a spec; the forms are at the top of this module."""
    from dtem.data import readers, shards

    scheme, colon, rest = spec.partition(":")
    if os.path.isdir(spec):
        return Folder(spec)
    if not colon or len(scheme) < 2 or "/" in scheme:  # no scheme: a path, C:\images among them
        problem = f"{spec!r} is not a folder" if os.path.exists(spec) else f"there is no folder {spec!r}"
        raise DtemError(f"{problem}; give a folder of images, or {_FORMS}")
    if scheme not in SCHEMES:
        raise DtemError(f"{spec!r}: there is no data scheme {scheme!r}; give a folder of images, or {_FORMS}")
    if not rest:
        raise DtemError(f"{spec!r} is incomplete: a name must follow {scheme}:")
    if scheme == "wds":
        return shards.Shards(spec, rest)
    if scheme == "timm":
        return readers.open_timm(spec, rest)
    return readers.open_hugging_face(spec, rest, streamed=scheme == "hf-stream")


class Folder(Source):
    """Images in class folders, or in one folder without labels.

    The label is the position of the class folder among all of them, by name. Where all names are whole numbers, they
    are the labels: a folder with some of the classes keeps the right ones.
    """

    def __init__(self, spec: str) -> None:
        self.root = Path(spec)
        entries = sorted(entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))
        classes = [name for name in entries if (self.root / name).is_dir()]
        loose = [name for name in entries if is_image(name) and name not in classes]
        self._names, self._labels = loose, [UNLABELLED] * len(loose)
        labelled = [(label, name) for label, entry in _labels(classes) for name in _images(self.root, entry)]
        if labelled and loose:
            raise DtemError(
                f"{spec} holds class folders ({classes[0]}, …) and images next to them ({loose[0]}, …): "
                f"whether they have labels is unclear. Move one or the other away"
            )
        if labelled and _SPLITS.issuperset(classes):
            raise DtemError(f"{spec} holds splits, not classes: give one of them, e.g. {self.root / classes[0]}")
        if labelled:
            self._names, self._labels = [name for _, name in labelled], [label for label, _ in labelled]
        if not self._names:
            raise DtemError(f"{spec} holds no images: looked for {', '.join(EXTENSIONS)}, also inside class folders")
        super().__init__(spec, bool(labelled), len(self._names))

    def read(self, index: int) -> Record:
        name = self._names[index]
        return Record((self.root / name).read_bytes(), self._labels[index], name)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def labels(self) -> Sequence[int]:
        return self._labels

    @property
    def files(self) -> Sequence[str]:
        return [str(self.root / name) for name in self._names]


def _labels(classes: list[str]) -> Iterator[tuple[int, str]]:
    if all(name.isascii() and name.isdecimal() for name in classes):
        return ((int(name), name) for name in classes)
    return iter(enumerate(classes))


def _images(root: Path, entry: str) -> Iterator[str]:
    """Images anywhere below a class folder, as paths relative to `root`.

    Symbolic links are followed, but no folder is visited twice, nor any folder above the class folder.
    """
    start = (root / entry).resolve()
    visited = {start, *start.parents}
    for folder, below, files in os.walk(root / entry, followlinks=True):
        inside = Path(folder).relative_to(root)
        yield from ((inside / name).as_posix() for name in sorted(files) if is_image(name))
        below[:] = [name for name in sorted(below) if not _seen(Path(folder, name), visited)]


def _seen(folder: Path, visited: set[Path]) -> bool:
    """Whether a folder has been visited; from now on it has."""
    folder = folder.resolve()
    seen = folder in visited
    visited.add(folder)
    return seen


def is_image(name: str) -> bool:
    """Whether a file name has one of `EXTENSIONS`, in any case, and is not hidden (as macOS's ``._1.jpg``)."""
    return name.rpartition(".")[2].lower() in EXTENSIONS and not name.startswith(".")


def without(source: Source, names: Collection[str]) -> tuple[Source, int]:
    """`source` without the images whose file name, folders aside, is among `names`; and how many were left out.

    A stream is read once to count them.
    """
    unwanted = frozenset(map(_file, names))
    if not unwanted:
        return source, 0
    if source.length is None:
        left_out = sum(_file(record.name) in unwanted for record in source.stream(None, 0))
        return (_Filtered(source, unwanted), left_out) if left_out else (source, 0)
    known = source.names if source.names is not None else [source.read(i).name for i in range(source.length)]
    remaining = [index for index, name in enumerate(known) if _file(name) not in unwanted]
    if not remaining:
        raise DtemError(
            f"{source.spec}: all {source.length} images have names of files to leave out: give images that nothing "
            "was trained on, or, if only the names are the same, keep_listed = True"
        )
    left_out = source.length - len(remaining)
    return (Subset(source, remaining), left_out) if left_out else (source, 0)


def _file(name: str) -> str:
    return PurePosixPath(name).name


class Subset(Source):
    """Some images of a source that is read by index."""

    def __init__(self, source: Source, indices: list[int]) -> None:
        super().__init__(source.spec, source.labelled, len(indices))
        self.source = source
        self.indices = indices

    def read(self, index: int) -> Record:
        return self.source.read(self.indices[index])

    @property
    def names(self) -> Sequence[str] | None:
        names = self.source.names
        return None if names is None else [names[index] for index in self.indices]

    @property
    def labels(self) -> Sequence[int] | None:
        labels = self.source.labels
        return None if labels is None else [labels[index] for index in self.indices]

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


class _Filtered(Source):
    """A stream without the images of some names."""

    def __init__(self, source: Source, unwanted: frozenset[str]) -> None:
        super().__init__(source.spec, source.labelled, None)
        self.source = source
        self.unwanted = unwanted

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        return (record for record in self.source.stream(seed, epoch) if _file(record.name) not in self.unwanted)
