"""torch.export of a patched model: one graph for every batch size, and the .pt2 file."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dtem.errors import DtemError, first_line

Runner = Callable[[Tensor], Tensor]
"""Images -> logits, in some runtime."""

METADATA = "dtem.json"
"""The entry of a .pt2 file that holds the metadata."""


def trace(model: nn.Module, image: tuple[int, ...]) -> ExportedProgram:
    """The graph of `model`, which is in eval mode, for images of this size in batches of any size. r is fixed."""
    weight = next(model.parameters())
    example = torch.zeros(2, *image, dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad(), no_warnings():
            return torch.export.export(model, (example,), dynamic_shapes=({0: Dim("batch", min=1)},))
    except DtemError:
        raise
    except Exception as error:  # torch.export raises errors of every kind
        raise DtemError(
            f"torch.export cannot take this model: {first_line(error)}. Try another method, or r = 0"
        ) from error


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


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Silence the log messages and warnings of exporters; what concerns the user is raised."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
