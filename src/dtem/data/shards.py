"""WebDataset shards: tar files in which ``KEY.jpg`` and ``KEY.cls`` lie side by side.

Read with the standard library; nothing in a shard is ever unpickled. Shards are local files, read sequentially;
shuffling goes by shards and then through a buffer.
"""

import glob
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dtem.data.sources import EXTENSIONS, UNLABELLED, Record, Source, is_image
from dtem.errors import DtemError

BUFFER = 1000
"""Encoded images in the buffer of a shuffled stream."""
SUFFIXES = (".tar", ".tar.gz", ".tgz")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class Shards(Source):
    """A stream from tar files; it has labels if its first image has one."""

    def __init__(self, spec: str, pattern: str) -> None:
        self.paths = find(pattern)
        super().__init__(spec, True, None)
        first = next(self.stream(None, 0), None)
        if first is None:
            raise DtemError(f"{spec}: no images in {self.paths[0]}; looked for {', '.join(EXTENSIONS)}")
        self.labelled = first.label != UNLABELLED

    @property
    def files(self) -> Sequence[str]:
        return self.paths

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        if seed is None:
            return (record for path in self.paths for record in records(path))
        random = np.random.default_rng([seed, epoch])
        paths = [self.paths[index] for index in random.permutation(len(self.paths))]
        return buffered((record for path in paths for record in records(path)), random)


def find(pattern: str) -> list[str]:
    """Paths of the shards of a pattern with braces, a glob, or a folder."""
    paths: list[str] = []
    for path in expand(pattern):
        if os.path.isdir(path):
            shards = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(SUFFIXES))
        else:
            shards = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if not shards:
            raise DtemError(f"wds:{pattern}: there is no shard {path}; looked for {', '.join(SUFFIXES)}, local")
        paths += shards
    return paths


def expand(pattern: str) -> Iterator[str]:
    """``a-{08..10}.tar`` -> a-08.tar, a-09.tar, a-10.tar; ``{a,b}`` -> a, b. Leading zeros keep the width."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    limits = _RANGE.fullmatch(braces[1])
    words = braces[1].split(",")
    if limits is not None:
        first, last, width = int(limits[1]), int(limits[2]), len(limits[1])
        words = [f"{number:0{width}d}" for number in range(first, last + 1)]
    for word in words:
        yield from expand(pattern[: braces.start()] + word + pattern[braces.end() :])


def records(path: str) -> Iterator[Record]:
    """The images of one shard, in its order."""
    try:
        with tarfile.open(path, "r|*") as shard:
            key, image, name, label = "", None, "", UNLABELLED
            for member in shard:
                folder, file = os.path.split(member.name)
                stem, _, extension = file.partition(".")
                if not member.isfile() or file.startswith("."):
                    continue
                if f"{folder}/{stem}" != key:
                    if image is not None:
                        yield Record(image, label, name)
                    key, image, label = f"{folder}/{stem}", None, UNLABELLED
                if not is_image(file) and extension.lower() != "cls":
                    continue
                opened = shard.extractfile(member)
                content = b"" if opened is None else opened.read()
                if extension.lower() == "cls":
                    label = _label(content, path, member.name)
                else:
                    image, name = content, member.name
            if image is not None:
                yield Record(image, label, name)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DtemError(f"shard {path} cannot be read: {error}. Fetch it again, or leave it out") from error


def _label(content: bytes, path: str, name: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise DtemError(f"{name} in shard {path} holds {content[:20]!r}, not the number of a class") from error


def buffered(stream: Iterable[Record], random: np.random.Generator) -> Iterator[Record]:
    """`stream` shuffled through a buffer."""
    held: list[Record] = []
    for record in stream:
        if len(held) < BUFFER:
            held.append(record)
            continue
        index = int(random.integers(BUFFER))
        held[index], out = record, held[index]
        yield out
    yield from (held[index] for index in random.permutation(len(held)))
