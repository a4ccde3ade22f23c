"""Records as tables. A number measured at full scale stands beside the paper's, with the difference; one measured at
small scale never does: the paper's have a table of their own, and both captions say what they were measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtem.measure.record import Record
from dtem.reproduce.specs import Study

LABELS = {
    "top1": "top-1 %",
    "top5": "top-5 %",
    "cross_entropy": "cross-entropy",
    "loss": "loss",
    "miou": "mIoU",
    "kendall": "Kendall's τ",
    "foreground": "tokens on the object, %",
    "gflops": "GFLOPs",
}
DIGITS = {"cross_entropy": 4, "loss": 4, "kendall": 3, "gflops": 2, "CIDEr": 1, "BLEU-4": 1, "METEOR": 1, "SPICE": 1}
SECOND = {"classification": "cross_entropy", "captioning": "loss", "segmentation": "pixel_accuracy"}
"""Beside the metric of a study, one that tells more finely or otherwise."""


@dataclass(frozen=True)
class Table:
    """What a table holds, in whatever form it is drawn."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def markdown(self) -> str:
        """As the documentation has it."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        drawn = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{drawn}\n\n_{self.caption}_"


def tables(study: Study, kept: Record) -> list[Table]:
    """Everything that a study's record says."""
    found = [_matrix(study, kept) if study.layout == "matrix" else _long(study, kept)]
    if claims := _claims(study, kept):
        found.append(claims)
    if kept.results["scale"] == "small" and (paper := papers(study)):
        found.append(paper)
    return [table for table in found if table.rows]


def papers(study: Study) -> Table | None:
    """The paper's own numbers, alone."""
    if not study.paper.values:
        return None
    metrics = study.paper.columns[2:]
    columns = ("", "rate", *(LABELS.get(name, name) for name in metrics))
    rows = tuple(
        (
            *map(str, line[:2]),
            *("" if value is None else _number(name, value) for name, value in zip(metrics, line[2:], strict=True)),
        )
        for line in study.paper.values
    )
    return Table("The paper's", columns, rows, f"Printed in the paper, full scale: {study.paper.setting}.")


def caption(kept: Record) -> str:
    """What the numbers were measured on, the scale first."""
    results = kept.results
    about: Mapping[str, Any] = results["about"]
    parts = [f"{results['scale'].capitalize()} scale: {', '.join(about['models'])}"]
    if about["seeds"]:
        length = f"{about['updates']:,} updates" if about["updates"] else f"{about['epochs']:g} epochs"
        images = f" from {about['training_images']:,} images" if about["training_images"] else ""
        parts.append(f"trained for {length} of {about['batch']}{images}")
        seeds = ", ".join(map(str, about["seeds"]))
        parts.append(f"seed{'s' if len(about['seeds']) > 1 else ''} {seeds}")
    if about["images"]:
        parts.append(f"judged on {about['images']:,} images")
    text = ", ".join(parts) + "."
    if results["scale"] == "small":
        text += " Not to be compared with numbers of the paper, which are of full scale."
    if results["missing"]:
        text += f" Not finished: {len(results['missing'])} cells are missing."
    where = f"torch {kept.versions['torch']}, timm {kept.versions['timm']}, {kept.time[:10]}"
    return f"{text} {where}, commit {(kept.commit or 'unknown')[:7]}"


def _long(study: Study, kept: Record) -> Table:
    """A line per row and rate."""
    results = kept.results
    name, other = LABELS.get(study.metric, study.metric), SECOND.get(study.task, "")
    if study.measure != "accuracy":
        other = ""
    first = "blocks" if study.measure == "kendall" else "r"
    full = results["scale"] == "full"
    columns = ["", first, *([f"{name}: paper", "measured", "difference"] if full else [name]), "by seed"]
    if other:
        columns.append(LABELS.get(other, other))
    columns += [f"against {study.reference} (95 %)"]
    counted = study.measure == "accuracy"
    if counted:
        columns += ["GFLOPs"] if not full else ["GFLOPs: paper", "counted as the paper does"]
    rows = []
    for row in results["rows"]:
        rate = row["rate"] if not row["rate"] or row["rate"] == row["r"] else f"{row['rate']} (r = {row['r']})"
        line = [row["row"], rate if study.measure != "kendall" else row["rate"]]
        line += _three(study, row, study.metric, full)
        seeds = row["by_seed"][study.metric]
        line.append(", ".join(_number(study.metric, value) for value in seeds) if len(seeds) > 1 else "")
        if other:
            line.append(_number(other, row["metrics"][other]) if other in row["metrics"] else "")
        line.append(_against(row["against_reference"], study.metric))
        if counted:
            printed = study.paper.find(row["row"], row["rate"]).get("gflops")
            if full:
                line += ["" if printed is None else f"{printed:g}", f"{row['metrics']['paper'] / 1e9:.2f}"]
            else:
                line.append(f"{row['metrics']['macs'] / 1e9:.3g}")
        rows.append(tuple(line))
    if full:
        rows += _unmeasured(study, results, len(columns))
    return Table(study.title, tuple(columns), tuple(rows), caption(kept))


def _unmeasured(study: Study, results: Mapping[str, Any], width: int) -> list[tuple[str, ...]]:
    """What the paper prints and was not measured."""
    there = {(row["row"], row["rate"]) for row in results["rows"]}
    missing = [tuple(map(str, line[:2])) for line in study.paper.values if tuple(map(str, line[:2])) not in there]
    found = []
    for row, rate in missing:
        printed = study.paper.find(row, rate).get(study.metric)
        line = [row, rate, "" if printed is None else _number(study.metric, printed), "not measured"]
        found.append((*line, *[""] * (width - len(line))))
    return found


def _matrix(study: Study, kept: Record) -> Table:
    """Rates side by side."""
    results = kept.results
    full = results["scale"] == "full"
    rates = [rate for rate in dict.fromkeys(row["rate"] for row in results["rows"]) if rate]
    parts = ["paper", "measured", "difference"] if full else ["", f"against {study.reference} (95 %)"]
    columns = ["", *(f"r = {rate}{f': {part}' if part else ''}" for rate in rates for part in parts)]
    found = {(row["row"], row["rate"]): row for row in results["rows"]}
    rows = []
    for label in dict.fromkeys(row["row"] for row in results["rows"] if row["rate"]):
        line = [label]
        for rate in rates:
            row = found.get((label, rate))
            if row is None:
                line += [""] * len(parts)
                continue
            line += _three(study, row, study.metric, full)
            if not full:
                line.append(_against(row["against_reference"], study.metric))
        rows.append(tuple(line))
    base = [row for row in results["rows"] if not row["rate"]]
    note = "".join(f" {row['row']}: {_number(study.metric, row['metrics'][study.metric])}." for row in base)
    name = LABELS.get(study.metric, study.metric)
    return Table(f"{study.title}, {name}", tuple(columns), tuple(rows), f"{caption(kept)}.{note}".replace("..", "."))


def _claims(study: Study, kept: Record) -> Table | None:
    claims = kept.results["claims"]
    if not claims:
        return None
    finer = any("loss" in claim["difference"] for claim in claims) and study.metric != "loss"
    name = LABELS.get(study.metric, study.metric)
    columns = ("the paper says", "here", "at", f"{name} (95 %)", *(["loss (95 %)"] if finer else []), "does it show?")
    rows = []
    for claim in claims:
        own, other = claim["rows"]
        between = claim["difference"]
        line = [claim["text"], f"{own} − {other}", claim["rate"], _against(between, study.metric)]
        if finer:
            line.append(_against(between, "loss"))
        rows.append((*line, claim["verdict"]))
    said = "yes and no: the 95 % interval leaves out zero; it is over images and, with more than one, over seeds."
    return Table("Does the paper's finding show here?", columns, tuple(rows), f"{caption(kept)}. {said}")


def _three(study: Study, row: Mapping[str, Any], metric: str, full: bool) -> Sequence[str]:
    """At full scale paper, measured and difference; at small scale what was measured."""
    value = row["metrics"][metric]
    if not full:
        return [_number(metric, value)]
    printed = study.paper.find(row["row"], row["rate"]).get(metric)
    if printed is None:
        return ["", _number(metric, value), ""]
    return [_number(metric, printed), _number(metric, value), f"{value - printed:+.{DIGITS.get(metric, 2)}f}"]


def _number(metric: str, value: float) -> str:
    return f"{value:.{DIGITS.get(metric, 2)}f}"


def _against(between: Mapping[str, Any] | None, metric: str) -> str:
    if between is None or metric not in between:
        return ""
    digits = DIGITS.get(metric, 2)
    return "{value:+.{d}f} ({low:+.{d}f} … {high:+.{d}f})".format(**between[metric], d=digits)
