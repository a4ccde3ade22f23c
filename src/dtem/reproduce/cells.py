"""What there is to run: the cells of a study at a scale. Each trains one thing at most and is judged at its rates."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from dtem.reproduce.specs import UNMERGED, Scale, Study, Values, rates_of

_OWN = ("row", "preset", "rates", "fraction", "models", "seeded", "method")
"""What a cell of a spec file says beside settings."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training, or one method that needs none, and the rates that it is judged at."""

    row: str
    """What the tables call it: the same over seeds."""
    method: str
    seed: int
    trained: bool
    preset: str
    """Of `dtem train`: its settings, and at full scale its model."""
    settings: Values
    """On top of the preset, by the names of `dtem train`'s flags and of the method's options."""
    rates: dict[str, str]
    """What it is judged at: labels, each with its r."""
    model: str = ""
    """Label of its model where there are several."""
    fraction: float = 1.0
    """Of the training images."""
    seeded: bool = True
    """Whether the seed matters to it."""
    own: tuple[str, ...] = ()
    """The settings that it does not have from the study as a whole: its method must know these."""

    @property
    def name(self) -> str:
        """What progress and --only call it."""
        return f"{self.row}, seed {self.seed}" if self.seeded else self.row


def expand(study: Study, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """All cells of a study."""
    asked = study.at(scale)
    return [
        cell
        for label, model in (asked.models or {"": {}}).items()
        for cell in _of_model(asked, label, model, tuple(seeds) if seeds else asked.seeds)
    ]


def only(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """Those whose name fits a pattern such as ``dtem*``."""
    chosen = [cell for cell in cells if pattern is None or fnmatchcase(cell.name, pattern)]
    if not chosen:
        from dtem.types import DtemError

        raise DtemError(f"--only {pattern}: no cell is called so; --plan lists them: {cells[0].name}, …")
    return chosen


def _of_model(asked: Scale, label: str, model: Values, seeds: Sequence[int]) -> Iterator[Cell]:
    for name, values in asked.baselines.items():
        own = {"method": "tome" if name == UNMERGED else name, **values}
        rates = {"": "0"} if name == UNMERGED else _rates(name, values, model, asked)
        runs = seeds if values.get("seeded") else seeds[:1]
        yield from (_cell(asked, label, model, name, own, rates, seed, trained=False) for seed in runs)
    for name, values in asked.cells.items():
        if label and label not in values.get("models", [label]):
            continue
        rates = _rates(name, values, model, asked)
        for combination in itertools.product(*asked.sweep.values()):
            swept = dict(zip(asked.sweep, combination, strict=True))
            called = str(values.get("row", name))
            row = ", ".join(([called] if len(asked.cells) > 1 or not swept else []) + _labels(swept))
            own = {**values, **swept}
            yield from (_cell(asked, label, model, row, own, rates, seed, trained=True) for seed in seeds)


def _cell(
    asked: Scale, label: str, model: Values, row: str, own: Values, rates: dict[str, str], seed: int, *, trained: bool
) -> Cell:
    said = {key: value for key, value in own.items() if key not in _OWN}
    settings = {**asked.settings, **said}
    return Cell(
        row=f"{label}, {row}" if label else row,
        method=str(own.get("method", asked.settings.get("method", "dtem"))),
        seed=seed,
        trained=trained,
        preset=str(own.get("preset") or model.get("preset") or asked.preset),
        settings={key: value for key, value in settings.items() if key != "method"},
        rates=rates,
        model=label,
        fraction=float(own.get("fraction", 1.0)),
        seeded=trained or bool(own.get("seeded")),
        own=tuple(said),
    )


def _rates(name: str, own: Values, model: Mapping[str, Any], asked: Scale) -> dict[str, str]:
    """A cell's own rates, or else those that its model has for it, or has for all, or else the study's."""
    if "rates" in own:
        return rates_of(own["rates"])
    found = model.get("rates")
    if isinstance(found, Mapping) and any(isinstance(value, Mapping | list) for value in found.values()):
        found = found.get(name)
    return asked.rates if found is None else rates_of(found)


def _labels(swept: Values) -> list[str]:
    return [f"{name} = {_text(value)}" for name, value in swept.items()]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "×".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
