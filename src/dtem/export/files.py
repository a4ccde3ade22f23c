"""Writing a file for another runtime: trace, write beside, check, and only then give it its name."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dtem import adapters, ops
from dtem._version import __version__
from dtem.export import check, onnx, openvino, program
from dtem.handle import Handle
from dtem.types import DtemError

FORMATS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
"""Forms, and how their files' names end."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What came of an export."""

    files: list[Path]
    bytes: int
    agreement: check.Agreement
    metadata: dict[str, str]
    operators: dict[str, int]
    """How often each ONNX operator occurs; none for the torch form."""


def write(
    handle: Handle,
    path: str | os.PathLike[str],
    form: str,
    batches: Sequence[Tensor],
    *,
    labels: Sequence[str] | None = None,
    notes: Mapping[str, str] | None = None,
    int8: bool = False,
) -> Written:
    """Write the patched model as it stands, at its present r, to `path`.

    Args:
        handle: of a model in float32 on the CPU.
        path: its name ends in .onnx, .xml (OpenVINO; a .bin is written beside it) or .pt2 (torch).
        form: ``onnx``, ``openvino`` or ``torch``.
        batches: images, prepared as the model wants them, on which the file must agree with the model.
        labels: names of the classes, kept in the file.
        notes: anything else to keep in it, text by name.
        int8: quantise weights to int8 and activations as they come (onnx only). Such a file is not refused for what it
            computes: its agreement says how far it is from the model.
    """
    path = Path(path)
    _demand(path, form, int8)
    if handle.merger.family.startswith("hf"):
        raise DtemError(f"{handle.host.name}: models of transformers are not exported; give a timm model")
    strange = {f"{part.dtype} on {part.device}" for part in handle.model.parameters()} - {"torch.float32 on cpu"}
    if strange:
        raise DtemError(
            f"a file is written from float32 on the CPU, not {', '.join(sorted(strange))}: model.float().cpu()"
        )
    if handle.mode != "hard":
        raise DtemError("a file holds hard merging; set handle.mode = 'hard' first")
    held = describe(handle, labels, notes or {})
    with _for_logits(handle), contextlib.nullcontext() if form == "torch" else ops.whole():
        traced = program.trace(handle.model, handle.host.image)
    with _beside(path) as draft, _evaluating(handle.model):
        counts: dict[str, int] = {}
        if form == "torch":
            program.save(traced, draft, json.dumps(held))
            run = program.runner(draft)
        else:
            graph = draft.with_suffix(".onnx")
            onnx.save(traced, graph, held, fold=any(handle.plan) and not int8)
            if int8:
                onnx.quantise(graph, graph)
            counts = onnx.used(graph)
            if form == "openvino":
                openvino.save(graph, draft, held)
                graph.unlink()
            run = onnx.runner(draft) if form == "onnx" else openvino.runner(draft)
        found = check.agreement(handle.model, run, batches)
        if not int8:
            check.demand(found, form)
        files = [_place(draft, path, suffix) for suffix in _suffixes(form)]
    return Written(files, sum(file.stat().st_size for file in files), found, held, counts)


def describe(handle: Handle, labels: Sequence[str] | None, notes: Mapping[str, str]) -> dict[str, str]:
    """What a file says of itself, as text by name."""
    host = handle.host
    held = {
        "dtem": __version__,
        "host": host.name,
        "method": handle.method.name,
        "r": str(handle.r),
        "plan": json.dumps(list(handle.plan)),
        "image": json.dumps(list(host.image)),
        **notes,
    }
    if labels is not None:
        classes = getattr(handle.model, "num_classes", len(labels))
        if len(labels) != classes:
            raise DtemError(f"there are {len(labels)} labels for {classes} classes; give one for each")
        held["labels"] = json.dumps(list(labels), ensure_ascii=False)
    return held


def _demand(path: Path, form: str, int8: bool) -> None:
    if form not in FORMATS:
        raise DtemError(f"format {form!r} is not known; choose {', '.join(FORMATS)}")
    if path.suffix != FORMATS[form]:
        raise DtemError(f"{path.name}: the name of a file of format {form} must end in {FORMATS[form]}")
    if int8 and form != "onnx":
        raise DtemError(f"int8 goes with format onnx, not with {form}")
    if not path.parent.is_dir():
        raise DtemError(f"{path} cannot be written: there is no folder {path.parent}")


def _suffixes(form: str) -> tuple[str, ...]:
    """Of the files that belong together; the one that is opened comes last, when all of it is there."""
    return (".bin", ".xml") if form == "openvino" else (FORMATS[form],)


@contextlib.contextmanager
def _for_logits(handle: Handle) -> Iterator[None]:
    """A file gives logits and nothing else: what a class-token head does not read of the last block is left out."""
    before = handle.merger.shortcut
    handle.merger.shortcut = adapters.load(handle.merger.family).shortcuts
    try:
        yield
    finally:
        handle.merger.shortcut = before


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path of the same name in a folder beside it, gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix=".dtem-", dir=path.parent) as folder:
            yield Path(folder, path.name)
    except OSError as error:
        raise DtemError(f"{path} cannot be written: {error.strerror or error}") from error


def _place(draft: Path, path: Path, suffix: str) -> Path:
    target = path.with_suffix(suffix)
    os.replace(draft.with_suffix(suffix), target)
    return target


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
