"""Pictures of merged patches, method beside method, and how many of the tokens that are left lie on the object.

What the object is, the unmerged model's class attention says (`dtem.show`): its own idea of what matters.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtem.handle import Handle
from dtem.reproduce import running
from dtem.reproduce.bench import Bench
from dtem.reproduce.cells import Cell
from dtem.tasks.classification.show import show
from dtem.types import DtemError

DRAWN = 8
"""Images of which pictures are written."""


def foreground(bench: Bench, handle: Handle, rate: str) -> Tensor:
    """Of the tokens after the last block, the part (in percent) on the foreground: images × 1."""
    from tqdm import tqdm

    handle.r = rate
    found = []
    for _, image in tqdm(list(_images(bench)), unit="img", file=sys.stderr, leave=False):
        shared = show(handle, image).allocation(handle.method.name)
        if shared is None:
            raise DtemError(f"{handle.host.name} has no class token, by which foreground is told; choose another model")
        whole = shared.foreground_tokens + shared.background_tokens
        found.append([100 * shared.foreground_tokens / whole])
    return torch.tensor(found, dtype=torch.float64)


def draw(bench: Bench, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write the pictures of the first images: every row of the study, at its first rate, with its first seed."""
    first = {cell.row: cell for cell in reversed(cells)}
    handles = {}
    for row, cell in first.items():
        handles[row], _ = running.trained(bench, cell)
        handles[row].r = next(iter(cell.rates.values()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{folder} cannot be made: {error.strerror}; choose another --work") from error
    written = []
    for number, image in _images(bench):
        if number == DRAWN:
            break
        written.append(folder / f"{number:02}.png")
        show(dict(reversed(handles.items())), image).save(written[-1])
    return written


def _images(bench: Bench) -> Iterator[tuple[int, Any]]:
    """Some evaluation images, drawn at random, the same every time."""
    from dtem.tasks.classification.evaluate import sample
    from dtem.tasks.classification.sources import open_source

    source = sample(open_source(bench.splits["eval"]), bench.study.at(bench.scale).images)
    if source.length is None:
        raise DtemError(f"{source.spec} is a stream; pictures need images that can be read one by one")
    return ((index, source.read(index).image) for index in range(source.length))
