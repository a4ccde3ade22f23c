"""The classes of every image of a source, kept part by part, so that a run can be stopped and taken up again.

An image is known by its position in the source, whatever its name. While a run goes on its parts lie in a folder; each
is written whole or not at all, and holds the images that could not be read too, with the reason. At the end all parts
become one Parquet file, in the order of the source.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtem.files import write_file
from dtem.tasks.classification.augment import Transform
from dtem.tasks.classification.data import Loader, none_left
from dtem.tasks.classification.evaluate import Forward, Progress
from dtem.tasks.classification.sources import Record, Source
from dtem.types import DtemError

SECONDS = 20.0
"""What an interruption can cost: a part is written this often."""
COLUMNS = ("position", "name", "label", "class", "class_name", "probability", "classes", "probabilities", "error")

Row = dict[str, Any]


def predict(
    forward: Forward,
    source: Source,
    transform: Transform,
    parts: "Parts",
    *,
    batch: int = 64,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
    top: int = 5,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    seconds: float = SECONDS,
) -> None:
    """Run `forward` on this process's share of the images that no part holds yet.

    Args:
        forward: images to logits, on `device`.
        source: of the images, labelled or not.
        transform: from `data.eval_transform`.
        parts: where the outcome goes.
        batch: images per forward.
        workers: processes that decode ahead; 0 decodes in this one.
        rank, world: this process and how many there are; all must have read `parts` before any writes to it.
        top: likeliest classes that are kept.
        labels: names of the classes.
        device: where the images go.
        dtype: autocast to this type; None: the model's own precision.
        progress: called with the number of images after every batch.
        seconds: how often a part is written.
    """
    share = Share(source, parts.done, rank, world)
    if share.length == 0:
        return
    loader = Loader(share, transform, batch, workers=workers)
    device = torch.device(device)
    rows: list[Row] = []
    listed: set[str] = set()
    written = time.monotonic()
    for images, truth, names in _readable(loader):
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            logits = forward(images.to(device, non_blocking=True)).float()
        rows += answers(logits.cpu(), truth, names, top, labels)
        rows += _bad(loader, listed)
        if progress is not None:
            progress(len(names))
        if time.monotonic() - written >= seconds:
            parts.write(rows)
            rows, written = [], time.monotonic()
    parts.write(rows + _bad(loader, listed))


def _readable(loader: Loader) -> Iterator[Any]:
    """The batches of one pass. Images of which none can be read are no error here: they are listed as the others."""
    try:
        yield from loader.epoch(0)
    except DtemError as error:
        if not loader.skipped or str(error) != none_left(loader.source, loader.skipped):
            raise


def _bad(loader: Loader, listed: set[str]) -> list[Row]:
    """A row for every image that could not be read and is not listed yet."""
    fresh = [name for name in loader.skipped if name not in listed]
    listed.update(fresh)
    return [_row(name, error=loader.skipped[name]) for name in fresh]


def answers(
    logits: Tensor, truth: Tensor, names: Sequence[str], top: int, labels: Sequence[str] | None = None
) -> list[Row]:
    """One row per image: its likeliest classes with their probabilities."""
    best = logits.softmax(dim=1).topk(min(top, logits.shape[1]))
    return [
        _row(
            name,
            label=label if label >= 0 else None,
            classes=classes,
            probabilities=probabilities,
            class_name=None if labels is None else labels[classes[0]],
        )
        for name, label, classes, probabilities in zip(
            names, truth.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def _row(numbered: str, **found: Any) -> Row:
    position, _, name = numbered.partition("\t")
    row: Row = {**dict.fromkeys(COLUMNS), "position": int(position), "name": _text(name), **found}
    if row["error"] is not None:
        row["error"] = _text(row["error"])
    if row["classes"] is not None:
        row["class"], row["probability"] = row["classes"][0], row["probabilities"][0]
    return row


def _text(name: str) -> str:
    """The name in UTF-8, which Parquet holds: bytes that are none are written as escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


class Share(Source):
    """One process's images of those that are left. Their names carry the position in front."""

    def __init__(self, source: Source, done: Collection[int], rank: int = 0, world: int = 1) -> None:
        self.source = source
        self._done = frozenset(done)
        self._rank, self._world = rank, world
        self._left: list[int] | None = None
        if source.length is not None:
            left = [position for position in range(source.length) if position not in self._done]
            self._left = left[rank::world]
        super().__init__(source.spec, source.labelled, None if self._left is None else len(self._left))

    def read(self, index: int) -> Record:
        assert self._left is not None
        position = self._left[index]
        record = self.source.read(position)
        return record._replace(name=f"{position}\t{record.name}")

    def name(self, index: int) -> str:
        assert self._left is not None
        return f"{self._left[index]}\t{self.source.name(self._left[index])}"

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        for position, record in enumerate(self.source.stream(seed, epoch)):
            if position % self._world == self._rank and position not in self._done:
                yield record._replace(name=f"{position}\t{record.name}")


class Parts:
    """What a run has found so far, in the folder ``FILE.parts`` beside its file.

    `run` says what the run is (model, r, data, …): a folder or a file of another run is refused.
    """

    def __init__(self, file: Path, run: Mapping[str, Any], rank: int = 0) -> None:
        self.file = file
        self.folder = file.with_name(file.name + ".parts")
        self.run = dict(run)
        self._rank = rank
        self._written = 0
        arrow()  # before any work is done
        if file.is_dir():
            raise DtemError(f"{file} is a folder; name a file in it, such as {file / 'preds.parquet'}")
        self.finished = file.is_file() and self._same(_metadata(file), file)
        self.done: set[int] = set()
        if self.finished:
            return
        if next(self.folder.glob("*.parquet"), None) is not None:  # of a run that came to nothing, nothing is kept
            note = self.folder / "run.json"
            self._same(_noted(note), self.folder)
        for table in self._tables(("position",)):
            self.done.update(table.column("position").to_pylist())

    def _same(self, found: Any, where: Path) -> bool:
        differing = [key for key in self.run if not isinstance(found, dict) or found.get(key) != self.run[key]]
        if differing:
            raise DtemError(
                f"{where} holds another run: it differs in {', '.join(differing)}. Give another --out, or remove it"
            )
        return True

    def write(self, rows: Sequence[Row]) -> None:
        """One more part."""
        if not rows:
            return
        pa = arrow()
        self._written += 1
        if self._written == 1:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DtemError(f"{self.folder} cannot be made a folder: {error.strerror}") from error
            write_file(self.folder / "run.json", json.dumps(self.run, indent=2, ensure_ascii=False))
        table = pa.Table.from_pylist(list(rows), schema=_schema())
        write_file(self.folder / f"{self._rank:04d}-{time.time_ns()}-{self._written:06d}.parquet", _encoded(table))

    def join(self) -> int:
        """All parts as the one file; the folder is gone afterwards. Returns how many images it holds."""
        if not self.finished:
            pa = arrow()
            tables = [_schema().empty_table(), *self._tables(COLUMNS)]
            whole = pa.concat_tables(tables).sort_by("position")
            held = {"dtem": json.dumps(self.run, ensure_ascii=False)}
            write_file(self.file, _encoded(whole.replace_schema_metadata(held)))
        if self.folder.is_dir():  # also where a run was killed before it could
            for path in [*self.folder.glob("*.parquet"), self.folder / "run.json"]:
                path.unlink(missing_ok=True)
            self.folder.rmdir()
        return len(self.column("position"))

    def unreadable(self) -> dict[str, str]:
        """Reason by name, of the joined file."""
        names, errors = self.column("name"), self.column("error")
        return {name: error for name, error in zip(names, errors, strict=True) if error is not None}

    def column(self, name: str) -> list[Any]:
        """One column of the joined file."""
        return _read(self.file, (name,)).column(name).to_pylist()

    def _tables(self, columns: Sequence[str]) -> Iterator[Any]:
        return (_read(path, columns) for path in sorted(self.folder.glob("*.parquet")))


def _noted(note: Path) -> Any:
    """What a folder's note says of its run; None where there is none."""
    try:
        return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None
    except ValueError as error:
        raise DtemError(f"{note} is damaged: {error}. Remove {note.parent} and run again") from error


def arrow() -> Any:
    """pyarrow, or the way to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DtemError('writing Parquet needs the package pyarrow: pip install "dtem[predict]"') from error
    return pyarrow


def _schema() -> Any:
    pa = arrow()
    kinds: dict[str, Callable[[], Any]] = {
        "position": pa.int64,
        "name": pa.string,
        "label": pa.int64,
        "class": pa.int32,
        "class_name": pa.string,
        "probability": pa.float32,
        "classes": lambda: pa.list_(pa.int32()),
        "probabilities": lambda: pa.list_(pa.float32()),
        "error": pa.string,
    }
    return pa.schema([(name, kinds[name]()) for name in COLUMNS])


def _encoded(table: Any) -> bytes:
    pa = arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def _read(path: Path, columns: Sequence[str]) -> Any:
    try:
        return arrow().parquet.read_table(path, columns=list(columns))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DtemError(f"{path} is damaged or no table of predictions: {error}. Remove it and run again") from error


def _metadata(path: Path) -> Any:
    try:
        held = arrow().parquet.read_schema(path).metadata or {}
        return json.loads(held.get(b"dtem", b"null"))
    except (OSError, ValueError) as error:
        raise DtemError(f"{path} is there already and is no table of predictions ({error}); remove it") from error
