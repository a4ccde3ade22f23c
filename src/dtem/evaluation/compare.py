"""`dtem.compare`: methods at equal cost, on the same images."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation.classification import ClassificationReport, Evaluation, evaluate_classifiers, mean_gflops
from dtem.evaluation.evaluate import build
from dtem.evaluation.evaluation_report import save_record
from dtem.evaluation.variants import REFERENCE, Adapters, RunSettings, check_methods, labelled, patched_variants
from dtem.handle import Handle, patch
from dtem.integrations.weight_sharing import share
from dtem.measure import throughput
from dtem.measure.throughput import Spread, Timing
from dtem.methods import list_methods
from dtem.tables import Report, Table, giga, spread
from dtem.tasks import task_of
from dtem.tasks.running import eval_mode

TOLERANCE = 0.01
"""A variant further than this from its budget is marked."""


@dataclass(frozen=True)
class TimedCost:
    """How far one variant is from its budget, and how fast it is."""

    off_budget: float | None
    """Its MACs over the budget, minus 1; None for the unmerged model."""
    speedup: dict[str, Spread]
    """Time of the unmerged model over the time of this one, by batch size."""
    images_per_second_at: dict[str, float]
    """By batch size."""

    def cells(self) -> list[str]:
        """Images per second and speed-up as text, for each batch size."""
        cells = []
        for size, ratio in self.speedup.items():
            cells += [f"{self.images_per_second_at[size]:.1f}", spread(ratio.median, ratio.low, ratio.high)]
        return cells


@dataclass(frozen=True, repr=False)
class ComparisonReport(Report):
    """What `dtem.compare` returns: the evaluation of every variant at the budgets, and what it costs."""

    evaluation: ClassificationReport
    budgets: list[float]
    """In GFLOPs (MACs)."""
    costs: list[TimedCost]
    """One per row of the evaluation."""
    not_compared: dict[str, str]
    """Methods that were left out, and why."""

    def to_dict(self) -> dict[str, Any]:
        document = self.evaluation.to_dict()
        for row, cost in zip(document["rows"], self.costs, strict=True):
            row |= {name: value for name, value in asdict(cost).items() if value is not None}
        return {**document, "budgets": self.budgets, "not_compared": self.not_compared}

    def parts(self) -> list[Table | str]:
        timed = (f"{what}, batch {size}" for size in self.costs[0].speedup for what in ("im/s", "speed-up"))
        rows = [
            (row.method, row.r, mean_gflops(row), _off(cost.off_budget), *cost.cells())
            for row, cost in zip(self.evaluation.rows, self.costs, strict=True)
        ]
        columns = ("method", "budget", "GFLOPs (MACs)", "off", *timed)
        return [
            *self.evaluation.parts(),
            Table("Cost", columns, rows, f"!: more than {TOLERANCE:.0%} off its budget"),
            *(f"not compared: {name}: {reason}" for name, reason in self.not_compared.items()),
        ]

    def save_plot(self, path: str | Path) -> None:
        """Draw accuracy against GFLOPs, one line per method, as .png, .svg or .pdf."""
        self.evaluation.save_plot(path)

    def __repr__(self) -> str:
        return f"<ComparisonReport: {self.evaluation.title}, {len(self.costs)} variants, budgets {self.budgets}>"


def compare(
    model: str | nn.Module | Handle,
    data: str | os.PathLike[str] | Source,
    gflops: float | str | Sequence[float] = (0.65,),
    *,
    methods: str | Sequence[str] | None = None,
    adapters: Adapters = (),
    batch_size: int = 64,
    workers: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    limit: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    shortcut: bool = False,
    keep_listed: bool = False,
    timed_batch_size: int | Sequence[int] = (1, 32),
    rounds: int = 10,
    **model_options: Any,
) -> ComparisonReport:
    """Evaluate methods at equal cost on the same images: accuracy, the difference from ToMe image by image, and speed.

    Every method gets the schedule that meets each budget, in the blocks that it works in. Methods with trained parts
    take part with an adapter; without one they are named in the report and left out, since an untrained predictor says
    nothing about its method.

    Args:
        model: a classifier: its name (for `create_model`), a model, or a handle, whose method takes part as trained.
        data: labelled images, as for `evaluate`.
        gflops: budgets in GFLOPs (MACs convention).
        methods: names of methods; default: all that need no training, and those of the adapters.
        adapters: trained adapters, as for `evaluate`.
        batch_size: images per forward.
        workers: processes that decode images; 0: this one.
        device: ``cpu`` or ``cuda``.
        dtype: float32, or autocast to bfloat16 or float16.
        limit: this many images, drawn at random, the same every time (of a stream the first ones).
        out: folder for the outcomes of every image, one file per variant, and record.json.
        progress: show a progress bar on stderr.
        shortcut: in the last block of a class-token model, compute the class token only.
        keep_listed: also use images whose file names an adapter lists as its training images.
        timed_batch_size: batch sizes at which all variants are timed, in turns; ``()``: none.
        rounds: timed rounds.
        model_options: what `create_model` takes (``weights``, ``img_size``, …), where `model` is a name.

    Examples:
        >>> report = dtem.compare("deit_tiny_patch16_224", "imagenet/val", gflops=[0.65, 0.81])
        >>> print(report)
    """
    budgets = _budgets(gflops)
    names = None if methods is None else check_methods(methods)
    sizes = [timed_batch_size] if isinstance(timed_batch_size, int) else list(timed_batch_size)
    settings = RunSettings(batch_size, workers, device, dtype, limit, None if out is None else Path(out), progress)
    setup = build(model, data, model_options, settings)
    if (task := task_of(setup.model)) != "classification":
        raise DtemError(f"compare is for classifiers, and this model is for {task}; use evaluate")
    not_compared: dict[str, str] = {}
    if names is None:
        adapted = {label for label, _ in labelled(adapters) if label}
        adapted |= {setup.handle.method.name} if setup.handle else set()
        names, not_compared = comparable_methods(setup.model, adapted)
    specs = [f"{budget:g}G" for budget in budgets]
    handles = patched_variants(setup.model, names, adapters, setup.handle, shortcut, keep_listed)
    evaluation = evaluate_classifiers(setup.at(specs, *handles))
    if len(evaluation.variants) == 1:
        full, text = giga(evaluation.variants[0].macs), ",".join(f"{budget:g}" for budget in budgets)
        raise DtemError(f"gflops = {text} merges nothing: the unmerged model takes {full} GFLOPs itself")
    report = with_costs(evaluation, budgets, sizes, rounds, not_compared)
    save_record(report, settings.out, setup.source, "compare")
    return report


def with_costs(
    evaluation: Evaluation,
    budgets: Sequence[float],
    timed_batch_sizes: Sequence[int] = (1, 32),
    rounds: int = 10,
    not_compared: dict[str, str] | None = None,
) -> ComparisonReport:
    """The evaluation of variants at budgets, with their distance from the budget and their speed."""
    timings = {str(size): _timed(evaluation, size, rounds) for size in timed_batch_sizes}
    costs = []
    for variant in evaluation.variants:
        timed = {size: timing[variant.name] for size, timing in timings.items()}
        budget = float(variant.r.removesuffix("G")) * 1e9
        costs.append(
            TimedCost(
                off_budget=variant.macs / budget - 1 if budget else None,
                speedup={size: timing.speedup for size, timing in timed.items()},
                images_per_second_at={size: timing.images_per_second for size, timing in timed.items()},
            )
        )
    return ComparisonReport(evaluation.report, list(budgets), costs, not_compared or {})


def comparable_methods(model: nn.Module, adapted: set[str]) -> tuple[list[str], dict[str, str]]:
    """Methods that can run on `model` untrained, and why the others cannot; `adapted` ones have an adapter."""
    names, reasons = [REFERENCE], {}
    for name in list_methods():
        try:
            method = patch(share(model).to("meta"), name).method
        except DtemError as error:
            reasons[name] = str(error)
            continue
        if any(True for _ in method.parameters()):
            if name not in adapted:
                reasons[name] = f"it has trained parts: give its adapter, {name}=FILE"
        elif name not in names and not method.has_soft_mode():  # else it differs in training only
            names.append(name)
    return names, reasons


def _budgets(gflops: float | str | Sequence[float]) -> list[float]:
    """Budgets as positive numbers; as text with commas between."""
    parts: Any = gflops.split(",") if isinstance(gflops, str) else gflops
    try:
        budgets = [float(part) for part in (parts if isinstance(parts, Sequence) else [parts])]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) <= 0:
        raise DtemError(f"gflops = {str(gflops)!r} must be positive numbers, with commas between, such as 0.65,0.81")
    return budgets


def _timed(evaluation: Evaluation, size: int, rounds: int) -> dict[str, Timing]:
    """All variants at one batch size."""
    device = next(evaluation.models[0].parameters()).device
    batch = torch.randn(size, *evaluation.report.image, device=device)
    with eval_mode(*evaluation.models):
        return throughput.compare({each.name: each.forward.forward for each in evaluation.variants}, batch, rounds)


def _off(share: float | None) -> str:
    """How far a cost is from its budget; the unmerged model has none."""
    if share is None:
        return ""
    return f"{100 * share:+.1f} %" + (" !" if abs(share) > TOLERANCE else "")
