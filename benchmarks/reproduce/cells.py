"""The cells of a study at a scale. A cell is one training run, or one untrained method, with its evaluation rates."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.reproduce.specs import UNMERGED, Scale, Study, Values, parse_rates
from dtem.errors import DtemError

_CELL_KEYS = ("row", "preset", "rates", "fraction", "models", "seeded", "method")
"""Keys of a cell in a spec file that are not settings."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training run, or one untrained method, and the rates it is evaluated at."""

    row: str
    """Its row in the tables: the same for all seeds."""
    method: str
    seed: int
    trained: bool
    preset: str
    """Preset of `dtem train`: its settings, and at full scale its model."""
    settings: Values
    """Training settings and method options that override the preset."""
    rates: dict[str, str]
    """Evaluation rates: label to r."""
    model: str = ""
    """Label of its model where the study has several."""
    fraction: float = 1.0
    """Fraction of the training images."""
    seeded: bool = True
    """Whether the seed changes its result."""
    own_settings: tuple[str, ...] = ()
    """Settings of this cell alone, not of the whole study: its method must have these."""

    @property
    def name(self) -> str:
        """Its name in progress lines and for --only."""
        return f"{self.row}, seed {self.seed}" if self.seeded else self.row


def expand(study: Study, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """All cells of a study."""
    spec = study.at(scale)
    return [
        cell
        for label, model in (spec.models or {"": {}}).items()
        for cell in _cells_of_model(spec, label, model, tuple(seeds) if seeds else spec.seeds)
    ]


def matching(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """Cells whose name matches a pattern such as ``dtem*``."""
    chosen = [cell for cell in cells if pattern is None or fnmatchcase(cell.name, pattern)]
    if not chosen:
        raise DtemError(f"--only {pattern} matches no cell; --plan lists them: {cells[0].name}, …")
    return chosen


def _cells_of_model(spec: Scale, label: str, model: Values, seeds: Sequence[int]) -> Iterator[Cell]:
    for name, values in spec.baselines.items():
        own = {"method": "tome" if name == UNMERGED else name, **values}
        rates = {"": "0"} if name == UNMERGED else _rates(name, values, model, spec)
        runs = seeds if values.get("seeded") else seeds[:1]
        yield from (_cell(spec, label, model, name, own, rates, seed, trained=False) for seed in runs)
    for name, values in spec.cells.items():
        if label and label not in values.get("models", [label]):
            continue
        rates = _rates(name, values, model, spec)
        for combination in itertools.product(*spec.sweep.values()):
            swept = dict(zip(spec.sweep, combination, strict=True))
            title = [str(values.get("row", name))] if len(spec.cells) > 1 or not swept else []
            row = ", ".join([*title, *(f"{key} = {_text(value)}" for key, value in swept.items())])
            own = {**values, **swept}
            yield from (_cell(spec, label, model, row, own, rates, seed, trained=True) for seed in seeds)


def _cell(
    spec: Scale, label: str, model: Values, row: str, own: Values, rates: dict[str, str], seed: int, *, trained: bool
) -> Cell:
    own_settings = {key: value for key, value in own.items() if key not in _CELL_KEYS}
    settings = {**spec.settings, **own_settings}
    return Cell(
        row=f"{label}, {row}" if label else row,
        method=str(own.get("method", spec.settings.get("method", "dtem"))),
        seed=seed,
        trained=trained,
        preset=str(own.get("preset") or model.get("preset") or spec.preset),
        settings={key: value for key, value in settings.items() if key != "method"},
        rates=rates,
        model=label,
        fraction=float(own.get("fraction", 1.0)),
        seeded=trained or bool(own.get("seeded")),
        own_settings=tuple(own_settings),
    )


def _rates(name: str, own: Values, model: Mapping[str, Any], spec: Scale) -> dict[str, str]:
    """Rates of the cell, else of its model for this cell, else of its model, else of the study."""
    if "rates" in own:
        return parse_rates(own["rates"])
    rates = model.get("rates")
    if isinstance(rates, Mapping) and any(isinstance(value, Mapping | list) for value in rates.values()):
        rates = rates.get(name)
    return spec.rates if rates is None else parse_rates(rates)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "×".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
