"""`dtem.predict`: the likeliest classes of every image of a dataset, as one Parquet file."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtem import integrations
from dtem.data import sources
from dtem.data.labels import Labels, class_labels, num_classes
from dtem.data.loader import Loader, none_left
from dtem.data.preprocessing import resolve_data_config, transform_of
from dtem.data.sources import Record, Source
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.evaluation.prediction_files import PartialPredictions, Row, batch_rows, prediction_row
from dtem.evaluation.variants import RunSettings
from dtem.exporters import engines
from dtem.exporters.program import Runner
from dtem.files import lock
from dtem.handle import Handle
from dtem.measure import record
from dtem.progress import progress_bar
from dtem.tables import Report, Table
from dtem.tasks.running import eval_mode
from dtem.training.processes import Processes

ENGINES = ("eager", "onnx", "openvino")
MAX_LISTED = 5
"""Unreadable images that the report lists by name."""


@dataclasses.dataclass(frozen=True, repr=False)
class PredictReport(Report):
    """Outcome of `dtem.predict`."""

    model: str
    r: str
    path: str
    """The Parquet file."""
    images: int
    resumed_after: int
    """Images that an earlier, interrupted run had predicted."""
    unreadable: dict[str, str]
    """Reason by image; they are rows of the file, too."""

    def to_dict(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["path"]
        return {**fields, "file": os.path.basename(self.path)}

    def parts(self) -> list[Table | str]:
        summary = f"{os.path.basename(self.path)}: {self.images} images"
        if self.resumed_after:
            summary += f", {self.resumed_after} of them were done before"
        if self.unreadable:
            summary += f", {len(self.unreadable)} could not be read:"
        lines = [summary, *(f"  {name}: {reason}" for name, reason in list(self.unreadable.items())[:MAX_LISTED])]
        if len(self.unreadable) > MAX_LISTED:
            lines.append(
                f"  and {len(self.unreadable) - MAX_LISTED} more: the rows of the file whose error is not null"
            )
        return list(lines)


def predict(
    model: nn.Module | Handle,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    r: object = None,
    labels: Labels | None = None,
    top: int = 5,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    limit: int | None = None,
    engine: str = "eager",
    progress: bool = True,
) -> PredictReport:
    """Predict the classes of every image of a dataset and write them as one Parquet file, in the dataset's order.

    Predictions are saved every 20 seconds in the folder ``OUT.parts``: the same call again resumes an interrupted run.
    An image that cannot be read is a row with the reason in its column ``error``. Under ``accelerate launch`` every
    process predicts its share; on several machines `out` must be on a shared disk. A second run into the same file is
    refused while the first is at work.

    Args:
        model: a classifier, patched or not, or the handle of a patched one.
        data: a folder of images (in class folders or not), or ``timm:…``, ``hf:…``, ``wds:…``.
        out: the Parquet file; its columns are `prediction_files.COLUMNS`.
        r: tokens removed per block; None: the model's present r.
        labels: names of the classes: a file with one per line, or a list; None: ImageNet's where they fit.
        top: number of classes per image, the likeliest first.
        batch_size: images per forward.
        workers: processes that decode images; 0 decodes in this one.
        device: ``cpu`` or ``cuda``.
        dtype: ``float32``, or ``bfloat16`` or ``float16`` by autocast.
        limit: predict only this many images, the first ones.
        engine: what runs the model: PyTorch ``eager``, or ``onnx`` (onnxruntime) or ``openvino`` on the CPU, from a
            file that `dtem.export` writes and checks first.
        progress: show a progress bar.

    Examples:
        >>> handle = dtem.patch(model, r=13)
        >>> report = dtem.predict(handle, "photos", "predictions.parquet")
        >>> report.images, report.unreadable
    """
    if isinstance(model, Handle):
        model = model.model
    handle = Handle(model) if isinstance(getattr(model, "dtem", None), integrations.Merger) else None
    if handle is None and r is not None:
        raise DtemError(f"r = {r!r} is for a patched model; call dtem.patch(model, r={r!r}) first")
    host = handle.host if handle else integrations.find(model).describe(model)
    settings = RunSettings(batch_size, workers, device, dtype, progress=progress)
    for name, value in (("top", top), ("limit", limit)):
        if value is not None and value < 1:
            raise DtemError(f"{name} = {value} must be 1 or more")
    if num_classes(model) == 0:
        way_out = "load a …ForImageClassification" if integrations.is_transformers(model) else "give num_classes"
        raise DtemError(f"{host.name} has no classifier, so there are no classes to predict: {way_out}")
    if engine not in ENGINES:
        raise DtemError(f"engine = {engine!r} is not known; choose one of: {', '.join(ENGINES)}")
    engines.check_engine(engine, dtype, device)
    names = class_labels(model, labels)
    resolve_data_config(model)  # a model whose images cannot be prepared is refused before any are read
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        if handle is not None:
            stack.enter_context(handle.at(r=r))
        rate = str(handle.r) if handle else "0"
        forward_of = functools.partial(_forward, engine=engine, dtype=dtype)
        source = sources.open_source(os.fspath(data))
        identity = {
            "model": host.name,
            "method": handle.method.name if handle else None,
            "options": repr(handle.method.config) if handle else None,
            "r": rate,
            "img_size": list(host.image),
            "engine": engine,
            "dtype": dtype,
            "top": top,
            "limit": limit,
            "weights": _weights_hash(model),
            "labels": None if names is None else hashlib.sha256("\n".join(names).encode()).hexdigest(),
            "data": record.plain_command(["", os.fspath(data)])[1],
            "images": _images_hash(source),
        }
        saved = _predict_here(model, forward_of, source, Path(out), identity, settings, names, top, stack)
    images, unreadable = saved.summary()
    done = images if saved.finished else len(saved.done)
    return PredictReport(host.name, rate, os.fspath(out), images, done, unreadable)


def _predict_here(
    model: nn.Module,
    forward_of: Callable[[nn.Module], Runner],
    source: Source,
    out: Path,
    identity: dict[str, Any],
    settings: RunSettings,
    labels: Sequence[str] | None,
    top: int,
    stack: contextlib.ExitStack,
) -> PartialPredictions:
    """Predict what has no prediction yet, this process's share of it, and join all processes' predictions."""
    processes = Processes(cpu=settings.device == "cpu")
    if processes.rank == 0:
        stack.enter_context(lock(out, "predict run"))
    saved = PartialPredictions(out, identity, processes.rank)
    processes.wait()  # all have read the saved predictions before any adds to them
    remaining = RemainingImages(source, saved.done, processes.rank, processes.world, identity["limit"])
    if not saved.finished and remaining.length != 0:
        place = torch.device(processes.device if settings.device == "cuda" else "cpu")
        loader = Loader(
            remaining,
            # a file takes images of one shape
            transform_of(model) if identity["engine"] == "eager" else eval_transform(resolve_data_config(model)),
            settings.batch_size or 1,
            workers=settings.workers,
        )
        dtype = settings.autocast if identity["engine"] == "eager" else None
        forward = forward_of(model.to(place))
        with progress_bar(remaining.length, "predict", show=settings.progress) as advance:
            for rows in _predictions(forward, loader, top, labels, place, dtype):
                saved.add(rows)
                advance(len(rows))
        saved.flush()
    processes.wait()
    if processes.rank == 0:
        saved.join()
    processes.wait()
    return saved


def _forward(model: nn.Module, engine: str, dtype: str) -> Runner:
    """The model in an engine; PyTorch runs it as it is, under autocast."""
    return integrations.as_logits_fn(model) if engine == "eager" else engines.build(model, engine, dtype)


def _predictions(
    forward: Runner,
    loader: Loader,
    top: int,
    labels: Sequence[str] | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[list[Row]]:
    """Rows of one batch after the other, those of unreadable images among them."""
    listed = 0
    try:
        for images, truth, names in loader.epoch(0):
            with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = forward(images.to(device, non_blocking=True)).float()
            skipped = list(loader.skipped.items())
            errors = [prediction_row(name, error=reason) for name, reason in skipped[listed:]]
            listed = len(skipped)
            yield batch_rows(logits.cpu(), truth, names, top, labels) + errors
    except DtemError as error:  # a dataset of which no image can be read is no mistake here: its images are rows
        if not loader.skipped or str(error) != none_left(loader.source, loader.skipped):
            raise
    yield [prediction_row(name, error=reason) for name, reason in list(loader.skipped.items())[listed:]]


class RemainingImages(Source):
    """One process's share of the images that have no prediction yet. Their names are ``position<TAB>name``."""

    def __init__(
        self, source: Source, done: Collection[int], rank: int = 0, world: int = 1, limit: int | None = None
    ) -> None:
        self.source = source
        self._done = frozenset(done)
        self._rank, self._world, self._limit = rank, world, limit
        self._positions: list[int] = []
        if source.length is not None:
            total = source.length if limit is None else min(limit, source.length)
            self._positions = [position for position in range(total) if position not in self._done][rank::world]
        super().__init__(source.spec, source.labelled, None if source.length is None else len(self._positions))

    def read(self, index: int) -> Record:
        image = self.source.read(self._positions[index])
        return image._replace(name=f"{self._positions[index]}\t{image.name}")

    def name(self, index: int) -> str:
        return f"{self._positions[index]}\t{self.source.name(self._positions[index])}"

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        for position, image in enumerate(itertools.islice(self.source.stream(seed, epoch), self._limit)):
            if position % self._world == self._rank and position not in self._done:
                yield image._replace(name=f"{position}\t{image.name}")


def _weights_hash(model: nn.Module) -> str:
    """SHA-256 of all weights, those of the method included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _images_hash(source: Source) -> str:
    """SHA-256 of folder and names of the images, and of the sizes and times of their files."""
    folders = sorted({os.path.realpath(folder) for folder in map(os.path.dirname, source.files)})
    content = repr((folders, list(source.names or ()), [_file_stamp(file) for file in source.files]))
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


def _file_stamp(file: str) -> tuple[str, int, int]:
    try:
        status = os.stat(file)
    except OSError:  # a file that is missing will be a row with its error
        return os.path.basename(file), -1, -1
    return os.path.basename(file), status.st_size, status.st_mtime_ns
