"""Predictions as Parquet: partial files while a run goes on, one file at its end.

Each partial file is written completely or not at all. An image is identified by its position in the dataset.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dtem.errors import DtemError, require
from dtem.files import write_file

SAVE_SECONDS = 20.0
"""Predictions are saved this often: the most that an interruption can cost."""
COLUMNS = ("position", "name", "label", "class", "class_name", "probability", "classes", "probabilities", "error")

Row = dict[str, Any]


def prediction_row(numbered_name: str, **columns: Any) -> Row:
    """One row of the file; `numbered_name` is ``position<TAB>name``, and columns that are not given are null."""
    position, _, name = numbered_name.partition("\t")
    place = int(position) if position else None
    row: Row = {**dict.fromkeys(COLUMNS), "position": place, "name": _as_utf8(name), **columns}
    if row["error"] is not None:
        row["error"] = _as_utf8(row["error"])
    if row["classes"] is not None:
        row["class"], row["probability"] = row["classes"][0], row["probabilities"][0]
    return row


def batch_rows(
    logits: Tensor, truth: Tensor, names: Sequence[str], top: int, labels: Sequence[str] | None = None
) -> list[Row]:
    """One row per image: its likeliest classes with their probabilities."""
    best = logits.softmax(dim=1).topk(min(top, logits.shape[1]))
    columns = zip(names, truth.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        prediction_row(
            name,
            label=label if label >= 0 else None,
            classes=classes,
            probabilities=probabilities,
            class_name=None if labels is None else labels[classes[0]],
        )
        for name, label, classes, probabilities in columns
    ]


def prediction_table(rows: Sequence[Row]) -> Any:
    """Rows as a table of pyarrow."""
    return _pyarrow().Table.from_pylist(rows, schema=_schema())


def _as_utf8(text: str) -> str:
    """Parquet holds UTF-8: other bytes of a file name are written as escapes."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


class PartialPredictions:
    """The predictions of a run so far, in the folder ``FILE.parts`` beside its file.

    Args:
        file: the Parquet file that `join` writes.
        identity: what makes a run the same run (model, r, data, …). Files of another run are refused.
        rank: this process's number.
    """

    def __init__(self, file: Path, identity: Mapping[str, Any], rank: int = 0) -> None:
        self.file = file
        self.folder = file.with_name(file.name + ".parts")
        self.identity = dict(identity)
        self.done: set[int] = set()
        """Positions of the images that had a prediction when the run began."""
        self._rank = rank
        self._rows: list[Row] = []
        self._written = 0
        self._last_save = time.monotonic()
        _pyarrow()  # before any work is done
        if file.is_dir():
            raise DtemError(f"{file} is a folder; name a file in it, such as {file / 'preds.parquet'}")
        self.finished = file.is_file()
        if self.finished:
            self._check_identity(_read_identity(file), file)
            return
        tables = [_read(path, ("position",)) for path in self._files()]
        if tables:
            self._check_identity(self._folder_identity(), self.folder)
        for table in tables:
            self.done.update(table.column("position").to_pylist())

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    def _folder_identity(self) -> Any:
        path = self.folder / "run.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            raise DtemError(f"{path} is damaged: {error}. Remove {self.folder} and run again") from error

    def _check_identity(self, stored: Any, where: Path) -> None:
        stored = stored if isinstance(stored, dict) else {}
        differing = [key for key, value in self.identity.items() if stored.get(key) != value]
        if differing:
            raise DtemError(
                f"{where} holds another run: it differs in {', '.join(differing)}. Choose another file, or remove it"
            )

    def add(self, rows: Sequence[Row]) -> None:
        """More predictions; saved with those before them after `SAVE_SECONDS`."""
        self._rows += rows
        if time.monotonic() - self._last_save >= SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Save what has been added."""
        rows, self._rows, self._last_save = self._rows, [], time.monotonic()
        if not rows:
            return
        self._written += 1
        if self._written == 1:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DtemError(f"{self.folder} cannot be made a folder: {error.strerror}") from error
            write_file(self.folder / "run.json", json.dumps(self.identity, indent=2, ensure_ascii=False))
        file = self.folder / f"{self._rank:04d}-{time.time_ns()}-{self._written:06d}.parquet"
        write_file(file, _to_bytes(prediction_table(rows)))

    def join(self) -> None:
        """Write all partial files as the one file, and remove their folder."""
        if not self.finished:
            tables = [_schema().empty_table(), *(_read(path, COLUMNS) for path in self._files())]
            table = _pyarrow().concat_tables(tables).sort_by("position")
            metadata = {"dtem": json.dumps(self.identity, ensure_ascii=False)}
            write_file(self.file, _to_bytes(table.replace_schema_metadata(metadata)))
        if self.folder.is_dir():  # also one that a killed run has left
            for path in [*self._files(), self.folder / "run.json"]:
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def summary(self) -> tuple[int, dict[str, str]]:
        """Images in the joined file, and by name why some could not be read."""
        names, errors = (_read(self.file, ("name", "error")).column(name).to_pylist() for name in ("name", "error"))
        return len(names), {name: error for name, error in zip(names, errors, strict=True) if error is not None}


def _pyarrow() -> Any:
    require("pyarrow.parquet", "predict")
    return require("pyarrow", "predict")


def _schema() -> Any:
    pa = _pyarrow()
    text, whole, number = pa.string(), pa.int32(), pa.float32()
    types = (pa.int64(), text, pa.int64(), whole, text, number, pa.list_(whole), pa.list_(number), text)
    return pa.schema(list(zip(COLUMNS, types, strict=True)))


def _to_bytes(table: Any) -> bytes:
    pa = _pyarrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def _read(path: Path, columns: Sequence[str]) -> Any:
    try:
        return _pyarrow().parquet.read_table(path, columns=list(columns))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DtemError(f"{path} is damaged or not a table of predictions: {error}. Remove it and run again") from error


def _read_identity(path: Path) -> Any:
    try:
        metadata = _pyarrow().parquet.read_schema(path).metadata or {}
        return json.loads(metadata.get(b"dtem", b"null"))
    except (OSError, ValueError) as error:
        raise DtemError(f"{path} exists and is not a table of predictions ({error}); remove it") from error
