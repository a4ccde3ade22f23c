"""Study specs: one YAML file per study, in benchmarks/experiments.

Settings at the top level hold at both scales; those under ``full`` and ``small`` at one. torch is not imported:
``--list`` reads all specs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtem.errors import DtemError
from dtem.files import read_yaml

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
SCALES = ("small", "full")
TASKS = ("classification", "segmentation", "captioning")
MEASURES = ("accuracy", "kendall", "pictures", "speed")
LAYOUTS = ("long", "matrix")
STUDY_RECORD, CELL_RECORD = "reproduce", "reproduce-cell"
"""Kinds of records: of a study, and of one of its cells."""
UNMERGED = "unmerged"
"""The baseline that merges nothing."""

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A finding of the paper as a comparison of two rows, which can be tested on other numbers."""

    text: str
    better: str = ""
    """The row that should have the better metric …"""
    than: str = ""
    """… than this one."""
    alike: tuple[str, ...] = ()
    """Or: two rows that should not differ."""
    at: tuple[str, ...] = ()
    """Rates at which the claim is tested; none: all."""

    @property
    def rows(self) -> tuple[str, str]:
        """The row in question and the row it is compared with."""
        return (self.alike[0], self.alike[1]) if self.alike else (self.better, self.than)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A study at one scale."""

    preset: str = ""
    """Preset of `dtem train`; a model may have its own (see `models`)."""
    settings: Values = dataclasses.field(default_factory=dict)
    """Training settings (fields of `TrainConfig`) and method options that override the preset."""
    models: dict[str, Values] = dataclasses.field(default_factory=dict)
    """Models by label, each with its `preset` and its `rates` (also by cell); none: the model given by --model."""
    cells: dict[str, Values] = dataclasses.field(default_factory=dict)
    """Trained cells by name: settings, and optionally their own `preset`, `rates`, `fraction` of the training images,
    the `models` they apply to, and the `row` they belong to (a baseline trained once per rate has a cell for each)."""
    baselines: dict[str, Values] = dataclasses.field(default_factory=dict)
    """Untrained baselines by name: "unmerged", or a method; settings and rates as in `cells`."""
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """Swept settings, each with its list of values: every cell is run with all combinations."""
    rates: dict[str, str] = dataclasses.field(default_factory=dict)
    """Evaluation rates: label to r."""
    seeds: tuple[int, ...] = (0,)
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    """Data specs of training (``train``) and evaluation images (``eval``), with {data} for --data."""
    claims: tuple[Claim, ...] = ()
    measure: str = "accuracy"
    """accuracy, kendall (rank correlations), pictures, or speed (counted and timed with random weights)."""
    images: int = 0
    """Number of evaluation images (kendall, pictures); 0: all."""
    needs: str = ""
    cost: str = ""


@dataclasses.dataclass(frozen=True)
class Paper:
    """Numbers printed in the paper, for comparison."""

    setting: str = ""
    """Model, data and training they were measured with."""
    columns: tuple[str, ...] = ()
    """Row, rate, then metrics."""
    values: tuple[tuple[Any, ...], ...] = ()

    def find(self, row: str, rate: str) -> dict[str, float]:
        """The paper's metrics for a row at a rate."""
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
    """The paper's finding in a sentence."""
    full: Scale
    small: Scale
    paper: Paper
    task: str = "classification"
    metric: str = "top1"
    """The main metric of tables and plots."""
    reference: str = "tome"
    """The row all others are compared with."""
    layout: str = "long"
    """long: a table line per row and rate; matrix: rates side by side."""
    axis: str = "gflops"
    """x axis of the plot: gflops, rate, or the name of a swept setting."""

    def at(self, scale: str) -> Scale:
        """The study at "small" or "full"."""
        return self.small if scale == "small" else self.full


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all studies."""
    return tuple(path.stem for path in sorted(EXPERIMENTS.glob("*.yaml")))


def find(name: str) -> Study:
    """The study of that name."""
    if name not in names():
        raise DtemError(f"there is no study {name!r}; choose one of: {', '.join(names())}")
    return load(EXPERIMENTS / f"{name}.yaml")


def load(path: Path) -> Study:
    """Read and check a spec file."""
    content = read_yaml(path)
    try:
        return parse(path.stem, content)
    except (TypeError, ValueError) as error:
        raise DtemError(f"{path.name}: {error}") from error


def parse(name: str, content: Any) -> Study:
    """A study from the content of its file; unknown names are refused."""
    if not isinstance(content, Mapping):
        raise DtemError(f"a study is a mapping of names to values, not {type(content).__name__}")
    own = {field.name for field in dataclasses.fields(Study)} - {"name", "full", "small", "paper"}
    shared = {field.name for field in dataclasses.fields(Scale)}
    _check_names("study", content, own | shared | {"full", "small", "paper"})
    common = {key: value for key, value in content.items() if key in shared}
    scales: dict[str, Any] = {scale: _scale(scale, {**common, **(content.get(scale) or {})}) for scale in SCALES}
    texts: dict[str, Any] = {key: str(value) for key, value in content.items() if key in own}
    study = Study(name=name, paper=_paper(content.get("paper") or {}), **scales, **texts)
    for value, allowed in ((study.task, TASKS), (study.layout, LAYOUTS)):
        if value not in allowed:
            raise DtemError(f"{value!r} is not known; choose one of: {', '.join(allowed)}")
    return study


def _scale(name: str, content: Mapping[str, Any]) -> Scale:
    _check_names(name, content, {field.name for field in dataclasses.fields(Scale)})
    values = dict(content)
    values["rates"] = parse_rates(values.get("rates") or {})
    baselines = values.get("baselines") or {}
    if isinstance(baselines, Sequence):
        baselines = dict.fromkeys(baselines)
    values["baselines"] = {str(key): dict(value or {}) for key, value in baselines.items()}
    for key in ("cells", "models"):
        values[key] = {str(label): dict(value or {}) for label, value in (values.get(key) or {}).items()}
    sweep = values["sweep"] = dict(values.get("sweep") or {})
    for key, options in sweep.items():
        if not isinstance(options, list) or not options:
            raise DtemError(f"{name}: sweep {key} = {options!r} must be a list of values")
    values["seeds"] = tuple(values.get("seeds", (0,)))
    if (measure := values.get("measure", "accuracy")) not in MEASURES:
        raise DtemError(f"{measure!r} is not known; choose one of: {', '.join(MEASURES)}")
    values["claims"] = tuple(_claim(claim) for claim in values.get("claims") or ())
    return Scale(**values)


def parse_rates(rates: Any) -> dict[str, str]:
    """Label to r; in a list every r is its own label."""
    if isinstance(rates, Mapping):
        return {str(label): str(rate) for label, rate in rates.items()}
    return {str(rate): str(rate) for rate in rates}


def _claim(content: Any) -> Claim:
    _check_names("claim", content, {field.name for field in dataclasses.fields(Claim)})
    values: Values = {key: tuple(map(str, v)) if isinstance(v, list) else str(v) for key, v in content.items()}
    claim = Claim(**values)
    if bool(claim.better and claim.than) == bool(claim.alike) or len(claim.alike) not in (0, 2):
        raise DtemError(f"claim {claim.text!r} needs `better` and `than`, or two rows that are `alike`")
    return claim


def _paper(content: Mapping[str, Any]) -> Paper:
    _check_names("paper", content, {field.name for field in dataclasses.fields(Paper)})
    columns = tuple(content.get("columns", ()))
    values = tuple(tuple(line) for line in content.get("values", ()))
    for line in values:
        if len(line) != len(columns):
            raise DtemError(f"paper: {list(line)} has {len(line)} values for {len(columns)} columns")
    return Paper(str(content.get("setting", "")), columns, values)


def _check_names(part: str, content: Any, allowed: set[str]) -> None:
    if not isinstance(content, Mapping):
        raise DtemError(f"{part} must be a mapping of names to values, not {content!r}")
    if unknown := sorted(set(map(str, content)) - allowed):
        raise DtemError(f"{part}: {unknown[0]!r} is not known; choose one of: {', '.join(sorted(allowed))}")
