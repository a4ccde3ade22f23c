"""Share of the remaining tokens that lie on the foreground object, and pictures of merged patches.

The foreground comes from the class attention of the unmerged model (`dtem.show`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.reproduce import runner
from benchmarks.reproduce.cells import Cell
from benchmarks.reproduce.study_setup import StudySetup
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.progress import progress_bar
from dtem.visualise.show import show

NUM_PICTURES = 8


def foreground_share(setup: StudySetup, handle: Handle, rate: str) -> Tensor:
    """Percentage of the tokens after the last block that lie on the foreground, (images, 1)."""
    shares = []
    images = [image for _, image in _eval_images(setup)]
    with handle.at(r=rate), progress_bar(len(images), "foreground") as advance:
        for image in images:
            allocation = show(handle, image).allocation(handle.method.name)
            if allocation is None:
                raise DtemError(f"{handle.host.name} has no class token, which defines the foreground; choose another")
            tokens = allocation.foreground_tokens + allocation.background_tokens
            shares.append([100 * allocation.foreground_tokens / tokens])
            advance(1)
    return torch.tensor(shares, dtype=torch.float64)


def draw_pictures(setup: StudySetup, cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Write pictures of the first images: every row of the study at its first rate, with its first seed."""
    handles = {}
    for row, cell in {cell.row: cell for cell in reversed(cells)}.items():
        handles[row] = runner.train_cell(setup, cell)
        handles[row].r = next(iter(cell.rates.values()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{folder} cannot be made: {error.strerror}; choose another --work") from error
    paths = []
    for number, image in _eval_images(setup):
        if number == NUM_PICTURES:
            break
        paths.append(folder / f"{number:02}.png")
        show(dict(reversed(handles.items())), image).save(paths[-1])
    return paths


def _eval_images(setup: StudySetup) -> Iterator[tuple[int, Any]]:
    """A fixed random sample of the evaluation images."""
    from dtem.data.sources import open_source
    from dtem.tasks.running import sample

    source = sample(open_source(setup.splits["eval"]), setup.study.at(setup.scale).images)
    if source.length is None:
        raise DtemError(f"{source.spec} is a stream; pictures need images that can be read one by one")
    return ((index, source.read(index).image) for index in range(source.length))
