"""`dtem.export`: trace, write a temporary file, check it against PyTorch, and only then give it its name."""

import contextlib
import copy
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtem import integrations, ops
from dtem._version import __version__
from dtem.data.labels import Labels, class_labels, num_classes
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError, require
from dtem.exporters import check, onnx, openvino, program
from dtem.handle import Handle
from dtem.integrations import affine
from dtem.tables import Report, Table
from dtem.tasks.running import eval_mode, sample

FORMATS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
"""File formats and their endings."""
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
PACKAGES["openvino"] = (*PACKAGES["onnx"], "openvino")
INT8_PACKAGES = {"onnx": (), "openvino": ("nncf",)}
"""Optional packages that a format needs."""
CHECK_IMAGES, INT8_CHECK_IMAGES = 16, 1000
"""Images that a file is checked on by default. An int8 file has its accuracy measured on them; they are in memory."""

PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
"""Entries of the metadata that say how images are prepared, where that is known."""

Batches = list[tuple[Tensor, Tensor | None]]
"""Images with their labels, where there are any."""


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport(Report):
    """Outcome of `dtem.export`."""

    model: str
    method: str
    r: str
    plan: list[int]
    format: str
    int8: bool
    files: list[Path]
    bytes: int
    checked_on: str
    agreement: check.Agreement
    accuracy: dict[str, float] | None
    """Top-1 (%) of an int8 file and of the model, where the images have labels."""
    operators: dict[str, int]
    """How often each ONNX operator occurs; empty for the torch format."""
    metadata: dict[str, str]
    """What the file says of itself."""

    @property
    def random_weights(self) -> bool:
        """Whether the notes say so."""
        return self.metadata.get("weights") == "random"

    def to_dict(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "random_weights": self.random_weights,
            "files": [path.name for path in self.files],
            "agreement": dataclasses.asdict(self.agreement),
            "metadata": {name: text for name, text in self.metadata.items() if name != "labels"},
            "labels": "labels" in self.metadata,
        }

    def parts(self) -> list[Table | str]:
        agreement, hint = self.agreement, "" if self.checked_on == "data" else " (give data for real ones)"
        source = "images" if self.checked_on == "data" else self.checked_on
        lines: list[Table | str] = [
            f"{', '.join(path.name for path in self.files)}: {self.bytes / 1e6:.1f} MB, r = {self.r}, any batch size",
            f"against PyTorch on {agreement.images} {source}{hint}: largest difference {agreement.largest:.2g}, "
            f"median {agreement.typical:.2g}, same class {agreement.same_class} of {agreement.images}",
        ]
        if self.accuracy is not None:
            top1 = [f"{self.accuracy[f'top1_{name}']:.1f} % {name}" for name in ("float32", "int8")]
            lines.append(f"top-1 on {self.accuracy['images']} images: {', '.join(top1)}")
        elif self.int8:
            lines.append("the accuracy of int8 is not known: give labelled images as data")
        if self.random_weights:
            lines.append("the weights are random, as asked for: this file predicts nothing useful")
        return lines


def export(
    model: Handle | nn.Module,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    int8: bool = False,
    data: str | os.PathLike[str] | Sequence[Tensor] | None = None,
    limit: int | None = None,
    labels: Labels | None = None,
    notes: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write a patched model, at its present r, as a file that runs without dtem: ONNX, OpenVINO or torch.export.

    The batch size stays free. The file is run on images and refused if it disagrees with PyTorch; a file of that name
    that was there before then stays.

    Args:
        model: a handle, or its patched model (timm or transformers), in float32 on the CPU.
        path: the file: .onnx, .xml (OpenVINO; a .bin is written beside it) or .pt2 (torch).
        format: ``onnx``, ``openvino`` or ``torch``; None: by the ending of `path`.
        int8: quantise weights and activations to int8: onnx when it runs, openvino by the images of `data`. Such a
            file is not refused for its differences; its accuracy is measured where `data` has labels.
        data: images to check the file on: a folder, ``timm:…``, ``hf:…``, ``wds:…``, or batches of preprocessed
            images; None: random ones.
        limit: number of images; default 16, and 1000 with `int8` and `data`.
        labels: names of the classes, stored in the file: a file with one per line, or a list; None: ImageNet's where
            they fit.
        notes: more metadata to store in the file. ``{"weights": "random"}`` marks a model that was never trained.

    Examples:
        >>> handle = dtem.patch(model, r=13)
        >>> dtem.export(handle, "deit_s_r13.pt2", data="photos")
    """
    handle = model if isinstance(model, Handle) else Handle(model)
    path, format = Path(path), check_format(path, format, int8)
    _check_model(handle)
    if int8 and format == "openvino" and data is None:
        raise DtemError("int8 of OpenVINO takes the range of every activation from images: give them as data")
    if limit is not None and limit < 1:
        raise DtemError(f"limit = {limit} must be 1 or more")
    metadata = _metadata(handle, labels, notes or {})
    batches = _batches(handle, data, limit, int8)
    with _temporary(path) as draft, eval_mode(handle.model):
        merged = _with_merged_norms(handle)
        own_merge = contextlib.nullcontext() if format == "torch" else ops.fused_merge_op()
        with _logits_only(merged), integrations.traceable(merged.model), own_merge:
            traced = program.trace(integrations.as_logits_fn(merged.model), handle.host.image)
        operators: dict[str, int] = {}
        if format == "torch":
            program.save(traced, draft, json.dumps(metadata))
            run = program.runner(draft)
        else:
            graph = draft.with_suffix(".onnx")
            onnx.save(traced, graph, metadata, fold=any(handle.plan) and not int8)
            if int8 and format == "onnx":
                onnx.quantise(graph, graph)
            operators = onnx.operator_counts(graph)
            if format == "openvino":
                openvino.save(graph, draft, metadata)
                graph.unlink()
                if int8:
                    openvino.quantise(draft, [images for images, _ in batches])
            run = onnx.runner(draft) if format == "onnx" else openvino.runner(draft)
        model_run = integrations.as_logits_fn(handle.model)
        agreement = check.agreement(model_run, run, [images for images, _ in batches])
        if not int8:
            check.require_agreement(agreement, format)
        accuracy = _accuracy({"float32": model_run, "int8": run}, batches) if int8 else None
        files = [
            _move(draft, path, suffix) for suffix in ((".bin", ".xml") if format == "openvino" else (path.suffix,))
        ]
    return ExportReport(
        model=handle.host.name,
        method=handle.method.name,
        r=str(handle.r),
        plan=list(handle.plan),
        format=format,
        int8=int8,
        files=files,
        bytes=sum(file.stat().st_size for file in files),
        checked_on="random images" if data is None else "data",
        agreement=agreement,
        accuracy=accuracy,
        operators=operators,
        metadata=metadata,
    )


def _with_merged_norms(handle: Handle) -> Handle:
    """The adapter's norms and biases written into those of a copy of the host; the handle itself without any."""
    if handle.method.affine is None:
        return handle
    model = copy.deepcopy(handle.model)
    affine.merge_into_host(model)
    return Handle(model)


def check_format(path: str | os.PathLike[str], format: str | None = None, int8: bool = False) -> str:
    """The format of a file to write; refused where the file cannot be written or a package is missing."""
    path = Path(path)
    if format is None:
        format = {suffix: name for name, suffix in FORMATS.items()}.get(path.suffix)
        if format is None:
            raise DtemError(f"{path.name}: the format is not known; the name must end in {', '.join(FORMATS.values())}")
    if format not in FORMATS:
        raise DtemError(f"format = {format!r} is not known; choose {', '.join(FORMATS)}")
    if path.suffix != FORMATS[format]:
        raise DtemError(f"{path.name}: the name of a file of format {format} must end in {FORMATS[format]}")
    if int8 and format not in INT8_PACKAGES:
        raise DtemError(f"int8 requires format {' or '.join(INT8_PACKAGES)}, not {format}")
    if not path.parent.is_dir():
        raise DtemError(f"{path} cannot be written: there is no folder {path.parent}")
    for package in PACKAGES[format] + (INT8_PACKAGES[format] if int8 else ()):
        require(package, "export" if format == "onnx" else format)
    return format


def _check_model(handle: Handle) -> None:
    generates = getattr(handle.model, "can_generate", None)
    if generates is not None and generates():
        raise DtemError(
            f"{handle.host.name} generates text, which a file of this kind cannot: export its image encoder alone"
        )
    places = {f"{weight.dtype} on {weight.device}" for weight in handle.model.parameters()} - {"torch.float32 on cpu"}
    if places:
        listed = ", ".join(sorted(places))
        raise DtemError(f"a file is written from float32 on the CPU, not {listed}: call model.float().cpu() first")
    if handle.mode != "hard":
        raise DtemError("a file holds hard merging; set handle.mode = 'hard' first")


def _metadata(handle: Handle, labels: Labels | None, notes: Mapping[str, str]) -> dict[str, str]:
    """What the file says of itself, as text by name."""
    readable = len(handle.host.image) == 3 and (
        not integrations.is_transformers(handle.model) or hasattr(handle.model, "pretrained_cfg")
    )
    config = resolve_data_config(handle.model) if readable else {}
    metadata = {
        "dtem": __version__,
        "host": handle.host.name,
        "method": handle.method.name,
        "r": str(handle.r),
        "plan": json.dumps(list(handle.plan)),
        "image": json.dumps(list(handle.host.image)),
        **{name: json.dumps(config[name]) for name in PREPROCESSING if name in config},
        "schedule": str(handle.merger.schedule),
        **notes,
    }
    untrained = notes.get("weights") == "random"
    names = None if untrained and labels is None else class_labels(handle.model, labels)
    if names is not None:
        metadata["labels"] = json.dumps(names, ensure_ascii=False)
    return metadata


def _batches(
    handle: Handle, data: str | os.PathLike[str] | Sequence[Tensor] | None, limit: int | None, int8: bool
) -> Batches:
    """Preprocessed images to check the file on."""
    from dtem.data import sources
    from dtem.data.loader import Loader
    from dtem.data.transforms import eval_transform

    if data is None:
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(limit or CHECK_IMAGES, *handle.host.image, generator=generator), None)]
    if not isinstance(data, str | os.PathLike):
        return [(images, None) for images in data]
    limit = limit or (INT8_CHECK_IMAGES if int8 else CHECK_IMAGES)
    source = sample(sources.open_source(os.fspath(data)), limit)
    classes = num_classes(handle.model) or None if int8 else None
    loader = Loader(source, eval_transform(resolve_data_config(handle.model)), CHECK_IMAGES, num_classes=classes)
    batches: Batches = []
    for batch in loader.epoch(0):
        batches.append((batch.images[:limit], batch.labels[:limit] if source.labelled else None))
        limit -= len(batch.images)
        if limit <= 0:
            break
    return batches


def _accuracy(forwards: Mapping[str, program.Runner], batches: Batches) -> dict[str, float] | None:
    """Top-1 (%) by name; None where images have no labels."""
    correct, total = dict.fromkeys(forwards, 0), 0
    with torch.no_grad():
        for images, labels in batches:
            if labels is None:
                return None
            total += len(labels)
            for name, forward in forwards.items():
                correct[name] += int((forward(images).argmax(dim=1) == labels).sum())
    return {"images": total, **{f"top1_{name}": 100 * count / total for name, count in correct.items()}}


@contextlib.contextmanager
def _logits_only(handle: Handle) -> Iterator[None]:
    """Leave out what a class-token head does not read of the last block: a file returns logits and nothing else."""
    before = handle.merger.shortcut
    handle.merger.shortcut = integrations.load(handle.merger.family).shortcuts
    try:
        yield
    finally:
        handle.merger.shortcut = before


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path of the same name in a temporary folder beside it."""
    try:
        with tempfile.TemporaryDirectory(prefix=".dtem-", dir=path.parent) as folder:
            yield Path(folder, path.name)
    except OSError as error:
        raise DtemError(f"{path} cannot be written: {error.strerror or error}") from error


def _move(draft: Path, path: Path, suffix: str) -> Path:
    target = path.with_suffix(suffix)
    os.replace(draft.with_suffix(suffix), target)
    return target
