"""torch.export of a patched model: one graph for every batch size, and the .pt2 file."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dtem.types import DtemError

Runner = Callable[[Tensor], Tensor]
"""Images -> logits, by another runtime."""

METADATA = "dtem.json"
"""The file inside a .pt2 that holds what `metadata` says."""


def trace(model: nn.Module, image: tuple[int, int, int]) -> ExportedProgram:
    """The graph of `model` in eval mode, for images of this size in batches of any size.

    Merging is traced in the form that other runtimes can run (`ops.merge_by_product`): r is fixed from here on.
    """
    weight = next(model.parameters())
    example = torch.zeros(2, *image, dtype=weight.dtype, device=weight.device)
    training = model.training
    try:
        with torch.no_grad(), quietly():
            return torch.export.export(model.eval(), (example,), dynamic_shapes=({0: Dim("batch", min=1)},))
    except DtemError:
        raise
    except Exception as error:  # torch.export raises errors of every kind
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DtemError(f"torch.export cannot take this model: {first}. Try another method, or r = 0") from error
    finally:
        model.train(training)


def save(program: ExportedProgram, path: Path, metadata: str) -> None:
    """Write a .pt2 file; `torch.export.load(path).module()` runs it without dtem."""
    torch.export.save(program, path, extra_files={METADATA: metadata})


def runner(path: Path) -> Runner:
    """The program of a .pt2 file."""
    program = torch.export.load(path).module()

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = program(images)
        return logits

    return run


def metadata(path: Path) -> str:
    """What `save` was given."""
    held: Mapping[str, str] = {METADATA: ""}
    torch.export.load(path, extra_files=held)  # type: ignore[arg-type]
    return held[METADATA]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Exporters talk of their own affairs; what concerns the user is raised."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
