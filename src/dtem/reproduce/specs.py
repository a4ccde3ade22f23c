"""What a study is. One YAML file per study; `benchmarks/experiments` has them all, and a wheel brings them along.

A file says once what holds at both scales, and under ``full`` and ``small`` what does not. Nothing heavy is imported:
`dtem reproduce --list` reads all of them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dtem.training.config import TASKS

SCALES = ("small", "full")
MEASURES = ("accuracy", "kendall", "pictures")
UNMERGED = "unmerged"
"""A baseline: the model itself."""

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something that the paper found, in a form that can be held against other numbers."""

    text: str
    better: str = ""
    """The row that should be above …"""
    than: str = ""
    """… this one."""
    alike: tuple[str, ...] = ()
    """Or: two rows between which there should be no difference to speak of."""
    at: tuple[str, ...] = ()
    """The rates at which; none: all."""

    @property
    def rows(self) -> tuple[str, str]:
        """The row that is looked at, and the one that it is held against."""
        return (self.alike[0], self.alike[1]) if self.alike else (self.better, self.than)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A study at one scale."""

    preset: str = ""
    """Settings that training starts from: a preset of `dtem train`. Of a model's own preset, see `models`."""
    settings: Values = dataclasses.field(default_factory=dict)
    """Settings of training and of the method on top of that, by the names of `dtem train`'s flags."""
    models: dict[str, Values] = dataclasses.field(default_factory=dict)
    """Models by label, each with its `preset` and its `rates` (also by cell); none: the model at hand."""
    cells: dict[str, Values] = dataclasses.field(default_factory=dict)
    """What is trained, by name: settings, and if need be its own `preset`, `rates`, `fraction`, the `models` that have
    it, and the `row` that it belongs to (a baseline that is trained once per rate has a cell for each)."""
    baselines: dict[str, Values] = dataclasses.field(default_factory=dict)
    """What is not trained, by name: "unmerged", or a method; settings and rates as in `cells`."""
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """Settings by name, each with the values that it takes: every cell is run with all of their combinations."""
    rates: dict[str, str] = dataclasses.field(default_factory=dict)
    """What is evaluated: labels, each with its r."""
    seeds: tuple[int, ...] = (0,)
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    """Where training and evaluation images are below --data: ``train`` and ``eval``."""
    claims: tuple[Claim, ...] = ()
    images: int = 0
    """Images to look at; 0: all."""
    needs: str = ""
    cost: str = ""


@dataclasses.dataclass(frozen=True)
class Paper:
    """Numbers that the paper prints: facts to compare with."""

    setting: str = ""
    """What they were measured on."""
    columns: tuple[str, ...] = ()
    """Row, rate, and then metrics."""
    values: tuple[tuple[Any, ...], ...] = ()

    def find(self, row: str, rate: str) -> dict[str, float]:
        """The metrics that the paper prints for a row at a rate."""
        for line in self.values:
            if (str(line[0]), str(line[1])) == (row, rate):
                pairs = zip(self.columns[2:], line[2:], strict=True)
                return {name: float(value) for name, value in pairs if value is not None}
        return {}


@dataclasses.dataclass(frozen=True)
class Study:
    """One table or figure of the paper."""

    name: str
    title: str
    finding: str
    """What the paper found, in a sentence."""
    full: Scale
    small: Scale
    paper: Paper
    task: str = "classification"
    measure: str = "accuracy"
    metric: str = "top1"
    """The number that tables and plots show first."""
    reference: str = "tome"
    """The row that all others are compared with."""
    layout: str = "long"
    """long: a line per row and rate; matrix: rates side by side."""
    axis: str = "gflops"
    """What plots have below: gflops, rate, or the name of a swept setting."""

    def at(self, scale: str) -> Scale:
        """The study at "small" or "full"."""
        return self.small if scale == "small" else self.full


def folder() -> Path:
    """Where the spec files are: in the package (a wheel), or in the checkout around it."""
    package = Path(str(resources.files("dtem")))
    inside, beside = package / "experiments", package.parent.parent / "benchmarks" / "experiments"
    for place in (inside, beside):
        if place.is_dir():
            return place
    raise _error(f"the studies are neither in {inside} nor in {beside}: install dtem again, from a wheel or a checkout")


@functools.cache
def names() -> tuple[str, ...]:
    """All studies."""
    return tuple(path.stem for path in sorted(folder().glob("*.yaml")))


def find(name: str) -> Study:
    """The study of that name."""
    if name not in names():
        raise _error(f"there is no study {name!r}; `dtem reproduce --list` has them: {', '.join(names())}")
    return load(folder() / f"{name}.yaml")


def load(path: Path) -> Study:
    """Read and check a spec file."""
    try:
        import yaml
    except ImportError as error:
        raise _error('studies need the package pyyaml: pip install "dtem[train]"') from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error(f"{path} cannot be read as YAML: {error}") from error
    try:
        return parse(path.stem, found)
    except (TypeError, ValueError) as error:
        raise _error(f"{path.name}: {error}") from error


def parse(name: str, found: Any) -> Study:
    """A study from what its file holds; anything unknown is refused by name."""
    if not isinstance(found, Mapping):
        raise _error(f"a study is a set of names and values, not {type(found).__name__}")
    own = {field.name for field in dataclasses.fields(Study)} - {"name", "full", "small", "paper"}
    shared = {field.name for field in dataclasses.fields(Scale)}
    _known("study", found, own | shared | {"full", "small", "paper"})
    common = {key: value for key, value in found.items() if key in shared}
    scales: dict[str, Any] = {scale: _scale(scale, {**common, **(found.get(scale) or {})}) for scale in SCALES}
    told: dict[str, Any] = {key: str(value) for key, value in found.items() if key in own}
    study = Study(name=name, paper=_paper(found.get("paper") or {}), **scales, **told)
    for value, allowed in ((study.task, TASKS), (study.measure, MEASURES), (study.layout, ("long", "matrix"))):
        if value not in allowed:
            raise _error(f"{value!r} is not known; choose one of: {', '.join(allowed)}")
    return study


def _scale(name: str, found: Mapping[str, Any]) -> Scale:
    _known(name, found, {field.name for field in dataclasses.fields(Scale)})
    values = dict(found)
    values["rates"] = rates_of(values.get("rates") or {})
    baselines = values.get("baselines") or {}
    if isinstance(baselines, Sequence):
        baselines = dict.fromkeys(baselines)
    values["baselines"] = {str(key): dict(value or {}) for key, value in baselines.items()}
    for key in ("cells", "models"):
        values[key] = {str(label): dict(value or {}) for label, value in (values.get(key) or {}).items()}
    sweep = values["sweep"] = dict(values.get("sweep") or {})
    for key, options in sweep.items():
        if not isinstance(options, list) or not options:
            raise _error(f"{name}: sweep {key} = {options!r} must be a list of values")
    values["seeds"] = tuple(values.get("seeds", (0,)))
    values["claims"] = tuple(_claim(claim) for claim in values.get("claims") or ())
    return Scale(**values)


def rates_of(found: Any) -> dict[str, str]:
    """Rates by label; a list is its own labels."""
    if isinstance(found, Mapping):
        return {str(label): str(rate) for label, rate in found.items()}
    return {str(rate): str(rate) for rate in found}


def _claim(found: Any) -> Claim:
    _known("claim", found, {field.name for field in dataclasses.fields(Claim)})
    values: Values = {key: tuple(map(str, v)) if isinstance(v, list) else str(v) for key, v in found.items()}
    claim = Claim(**values)
    if bool(claim.better and claim.than) == bool(claim.alike) or len(claim.alike) not in (0, 2):
        raise _error(f"claim {claim.text!r} needs `better` and `than`, or two rows that are `alike`")
    return claim


def _paper(found: Mapping[str, Any]) -> Paper:
    _known("paper", found, {field.name for field in dataclasses.fields(Paper)})
    columns = tuple(found.get("columns", ()))
    values = tuple(tuple(line) for line in found.get("values", ()))
    for line in values:
        if len(line) != len(columns):
            raise _error(f"paper: {list(line)} has {len(line)} values for {len(columns)} columns")
    return Paper(str(found.get("setting", "")), columns, values)


def _known(what: str, found: Any, allowed: set[str]) -> None:
    if not isinstance(found, Mapping):
        raise _error(f"{what} must be names and values, not {found!r}")
    if unknown := sorted(set(map(str, found)) - allowed):
        raise _error(f"{what}: {unknown[0]!r} is not known; known are: {', '.join(sorted(allowed))}")


def _error(message: str) -> ValueError:
    from dtem.types import DtemError

    return DtemError(message)
