"""A few digits, and the ablation methods registered."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_study import setup_of, study

from benchmarks.reproduce import register_ablations
from benchmarks.reproduce.study_setup import StudySetup
from dtem.data import digits
from dtem.methods import METHODS


@pytest.fixture(autouse=True)
def _ablations() -> Iterator[None]:
    """The ablation methods are known in these tests only."""
    register_ablations()
    yield
    for name in ("tome_soft", "tome_gumbel"):
        METHODS._classes.pop(name)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders train, extra and val with a few digits each."""
    folder = tmp_path_factory.mktemp("digits")
    train, held_out = digits.load()
    for split, source, count in (("train", train, 12), ("extra", train, 4), ("val", held_out, 12)):
        step = source.length // count - (1 if split == "extra" else 0)
        for index in range(0, step * count, step):
            record = source.read(index)
            classes = folder / split / str(record.label)
            classes.mkdir(parents=True, exist_ok=True)
            record.image.save(classes / f"{Path(record.name).name}.png")
    return folder


@pytest.fixture
def setup(photographs: Path, tmp_path: Path) -> StudySetup:
    return setup_of(study(), photographs, tmp_path / "work")
