"""Datasets of other libraries, imported on use: timm's readers and Hugging Face datasets."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtem.data.sources import UNLABELLED, Record, Source
from dtem.errors import DtemError, first_line, require
from dtem.models.hub import offline_without_network

_OPTIONS = re.compile(r"([?#])([^?#]*)")
_STREAMED = {"hfids": "hf-stream:NAME", "wds": "wds:SHARDS", "tfds": "hf:NAME, or export it to a folder"}
_BUFFER = 1000


def parse(spec: str, rest: str, known: Sequence[str]) -> tuple[str, dict[str, str], str | None]:
    """``NAME?key=value&…#split`` -> name, options, split."""
    name = re.split(r"[?#]", rest, maxsplit=1)[0]
    options: dict[str, str] = {}
    split = None
    for mark, text in _OPTIONS.findall(rest):
        if mark == "#":
            split = text or None
            continue
        for pair in text.split("&"):
            key, equals, value = pair.partition("=")
            if not equals or key not in known:
                raise DtemError(f"{spec!r}: {pair!r} is not an option; write ?{'&'.join(f'{key}=…' for key in known)}")
            options[key] = value
    return name, options, split


def open_timm(spec: str, rest: str) -> Source:
    """``timm:READER[?root=DIR][#split]``; for ``folder/DIR`` and ``tar/FILE`` the rest of the reader is the root."""
    from timm.data.dataset_factory import create_dataset

    reader, options, split = parse(spec, rest, ["root"])
    kind, _, place = reader.partition("/")
    if kind in _STREAMED:
        raise DtemError(f"{spec!r}: timm streams {kind} in an order that cannot be resumed; use {_STREAMED[kind]}")
    if kind in ("folder", "tar", "image_folder", "image_tar"):
        if not os.path.exists(place):
            raise DtemError(f"{spec!r}: there is no folder {place!r}")
        options.setdefault("root", place)
        reader = ""
        if split is not None and not os.path.isdir(os.path.join(options["root"], split)):
            raise DtemError(f"{spec!r}: {options['root']} has no folder {split!r}")
    arguments: dict[str, Any] = {"split": split} if split is not None else {"search_split": False}
    try:
        return _Timm(spec, create_dataset(reader, **{**arguments, **options}))
    except Exception as error:  # each reader raises its own kinds
        raise DtemError(f"timm cannot open {spec!r}: {first_line(error)}") from error


class _Timm(Source):
    """A dataset of timm, read by index."""

    def __init__(self, spec: str, dataset: Any) -> None:
        if not len(dataset):
            raise DtemError("it holds no images")
        super().__init__(spec, True, len(dataset))
        self.dataset = dataset
        self.reader = getattr(dataset, "reader", None)  # torchvision's have none

    def read(self, index: int) -> Record:
        if self.reader is None:
            image, label = self.dataset[index]
            return Record(image, int(label), f"{index:08d}")
        # Not dataset[index]: that returns another image where this one cannot be read.
        file, label = self.reader[index][:2]
        with file:
            return Record(file.read(), UNLABELLED if label is None else int(label), self.name(index))

    def name(self, index: int) -> str:
        named = None if self.reader is None else self.dataset.filename(index)
        return str(named) if named else f"{index:08d}"

    @property
    def files(self) -> Sequence[str]:
        if self.reader is None:
            return ()
        return [str(self.dataset.filename(index, absolute=True)) for index in range(len(self.dataset))]

    @property
    def names(self) -> Sequence[str]:
        return [self.name(index) for index in range(len(self.dataset))]

    @property
    def labels(self) -> Sequence[int] | None:
        samples = getattr(self.reader, "samples", None)  # folders have them
        return None if samples is None else [int(label) for _, label in samples]


def open_hugging_face(spec: str, rest: str, streamed: bool) -> Source:
    """``hf:PATH_OR_NAME[?image=…&label=…&config=…][#split]``, read by index or streamed."""
    datasets = require("datasets", "datasets")
    path, options, split = parse(spec, rest, ["image", "label", "config"])
    if path.startswith((".", "/", "~")) and not os.path.exists(path):
        raise DtemError(f"{spec!r}: there is no folder {path!r}")
    try:
        if any(os.path.isfile(os.path.join(path, mark)) for mark in ("state.json", "dataset_dict.json")):
            dataset = datasets.load_from_disk(path)
        else:
            with contextlib.nullcontext() if os.path.exists(path) else offline_without_network():
                dataset = datasets.load_dataset(path, options.get("config"), streaming=streamed)
    except Exception as error:  # of every kind, from the network too
        raise DtemError(f"datasets cannot open {spec!r}: {first_line(error)}") from error
    if isinstance(dataset, Mapping):  # splits by name
        if split is None and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            problem = "name a split" if split is None else f"there is no split {split!r}"
            raise DtemError(f"{spec!r}: {problem}; it has {', '.join(f'#{name}' for name in dataset)}")
        dataset = dataset[split]
    elif split is not None:
        raise DtemError(f"{spec!r}: this dataset was saved without splits; leave #{split} out")
    image, label = columns(spec, dataset.features, options)
    dataset = dataset.select_columns([image] if label is None else [image, label])
    dataset = dataset.cast_column(image, datasets.Image(decode=False))
    if streamed and not hasattr(dataset, "set_epoch"):
        dataset = dataset.to_iterable_dataset()
    return _HuggingFace(spec, dataset, image, label, streamed)


def columns(spec: str, features: Mapping[str, Any] | None, options: Mapping[str, str]) -> tuple[str, str | None]:
    """Names of the image column and the label column: as given, else by type. An empty ``label=`` means none."""
    if features is None:
        raise DtemError(f"{spec!r} does not say which columns it has; load it with hf: instead of hf-stream:")
    for key in ("image", "label"):
        if options.get(key) and options[key] not in features:
            raise DtemError(f"{spec!r}: there is no column {options[key]!r}; it has {', '.join(features)}")
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    named = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    numbers = [name for name in features if str(getattr(features[name], "dtype", "")).startswith(("int", "uint"))]
    image = options.get("image") or _only(spec, "image", images)
    label = options["label"] or None if "label" in options else _only(spec, "label", named or numbers)
    if image is None:
        raise DtemError(f"{spec!r}: no column holds images; it has {', '.join(features)}. Name one: ?image=…")
    return image, label


def _only(spec: str, key: str, names: list[str]) -> str | None:
    if key in names:
        return key
    if len(names) > 1:
        raise DtemError(f"{spec!r}: which column is the {key}? Name one of {', '.join(names)}: ?{key}={names[0]}")
    return names[0] if names else None


def row_name(index: int, path: str | None) -> str:
    """``00000012/cat.jpg``: the row, then the file name if it has one."""
    return f"{index:08d}/{os.path.basename(path)}" if path else f"{index:08d}"


def _encoded(image: Mapping[str, Any]) -> Any:
    if image["bytes"] is not None:
        return image["bytes"]
    if os.path.isfile(image["path"]):
        with open(image["path"], "rb") as file:
            return file.read()
    return require("datasets", "datasets").Image().decode_example(image)  # inside an archive, or remote


class _HuggingFace(Source):
    """A Hugging Face dataset, read by index or, where it is iterable, streamed."""

    def __init__(self, spec: str, dataset: Any, image: str, label: str | None, streamed: bool) -> None:
        if not streamed and not len(dataset):
            raise DtemError(f"{spec!r} holds no images")
        super().__init__(spec, label is not None, None if streamed else len(dataset))
        self.dataset = dataset
        self.image = image
        self.label = label

    def read(self, index: int) -> Record:
        return self._record(index, self.dataset[index])

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        dataset = self.dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=_BUFFER)
            dataset.set_epoch(epoch)
        for index, row in enumerate(dataset):
            try:
                yield self._record(index, row)
            except OSError as error:
                name = row_name(index, row[self.image]["path"])
                raise DtemError(f"{self.spec}: {name} cannot be fetched: {first_line(error)}") from error

    def _record(self, index: int, row: Mapping[str, Any]) -> Record:
        """The record of a row. Its name has the row's number: file names may repeat, or be missing."""
        image = row[self.image]
        label = UNLABELLED if self.label is None or row[self.label] is None else int(row[self.label])
        return Record(_encoded(image), label, row_name(index, image["path"]))

    def _column(self, name: str) -> Any:
        """A column of the table, without decoding images."""
        return self.dataset.select_columns([name]).with_format("arrow")[:].column(0)

    def _paths(self) -> Iterator[str | None]:
        chunks = self._column(self.image).chunks
        return itertools.chain.from_iterable(chunk.field("path").to_pylist() for chunk in chunks)

    @property
    def names(self) -> Sequence[str] | None:
        return None if self.length is None else [row_name(index, path) for index, path in enumerate(self._paths())]

    def name(self, index: int) -> str:
        return row_name(index, None)

    @property
    def files(self) -> Sequence[str]:
        """The tables, and the images that they refer to."""
        if self.length is None:
            return ()
        paths = [path for path in self._paths() if path and os.path.isabs(path)]
        return [*(table["filename"] for table in self.dataset.cache_files), *paths]

    @property
    def labels(self) -> Sequence[int] | None:
        if self.length is None:
            return None
        if self.label is None:
            return [UNLABELLED] * self.length
        return [UNLABELLED if label is None else label for label in self._column(self.label).to_pylist()]
