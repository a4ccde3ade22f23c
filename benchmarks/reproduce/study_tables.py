"""Tables of a study's record.

Full-scale numbers stand beside the paper's, with the difference. Small-scale numbers do not: the paper's have their own
table, and both captions say what the numbers were measured on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reproduce.specs import Study
from dtem.measure.record import Record
from dtem.tables import Table, spread

LABELS = {
    "top1": "top-1 %",
    "top5": "top-5 %",
    "cross_entropy": "cross-entropy",
    "loss": "loss",
    "miou": "mIoU",
    "kendall": "Kendall's τ",
    "foreground": "tokens on the object, %",
    "gflops": "GFLOPs",
    "speedup": "speed-up",
}
DIGITS = {"cross_entropy": 4, "loss": 4, "kendall": 3, "gflops": 2, "CIDEr": 1, "BLEU-4": 1, "METEOR": 1, "SPICE": 1}
SECOND = {"classification": "cross_entropy", "captioning": "loss", "segmentation": "pixel_accuracy"}
"""A second metric by task, shown beside the main one."""


def as_markdown(table: Table) -> str:
    """A table for the documentation."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    drawn = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"**{table.title}**\n\n{drawn}\n\n_{table.caption}_"


def study_tables(study: Study, record: Record) -> list[Table]:
    """All tables of a study's record."""
    if study.at(record.results["scale"]).measure == "speed":
        return [_speed_table(study, record)]
    tables = [_matrix_table(study, record) if study.layout == "matrix" else _long_table(study, record)]
    if claims := _claims_table(study, record):
        tables.append(claims)
    if record.results["scale"] == "small" and (paper := _paper_table(study)):
        tables.append(paper)
    return [table for table in tables if table.rows]


def _paper_table(study: Study) -> Table | None:
    """The paper's numbers."""
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


def _caption(record: Record) -> str:
    """What the numbers were measured on, scale first."""
    results = record.results
    about: Mapping[str, Any] = results["about"]
    parts = [f"{results['scale'].capitalize()} scale: {', '.join(about['models'])}"]
    if about["seeds"]:
        length = f"{_length(about)} of {about['batch']}"
        if _trainings_differ(results):
            length = "as the rows say"
        images = f" from {about['training_images']:,} images" if about["training_images"] else ""
        parts.append(f"trained {'' if _trainings_differ(results) else 'for '}{length}{images}")
        seeds = ", ".join(map(str, about["seeds"]))
        parts.append(f"seed{'s' if len(about['seeds']) > 1 else ''} {seeds}")
    if about["images"]:
        parts.append(f"judged on {about['images']:,} images")
    text = ", ".join(parts) + "."
    if results["scale"] == "small":
        text += " Not to be compared with numbers of the paper, which are of full scale."
    if results["missing"]:
        text += f" Not finished: {len(results['missing'])} cells are missing."
    where = f"torch {record.versions['torch']}, timm {record.versions['timm']}, {record.time[:10]}"
    return f"{text} {where}, commit {(record.commit or 'unknown')[:7]}"


def _length(training: Mapping[str, Any]) -> str:
    return f"{training['updates']:,} updates" if training["updates"] else f"{training['epochs']:g} epochs"


def _trainings(results: Mapping[str, Any]) -> dict[str, str]:
    """How each row was trained, by row; old records do not say."""
    texts = {}
    for row in results["rows"]:
        if training := row.get("training"):
            texts[row["row"]] = f"{_length(training)} of {training['batch']}, {training['loss']}, lr {training['lr']:g}"
    return texts


def _trainings_differ(results: Mapping[str, Any]) -> bool:
    return len(set(_trainings(results).values())) > 1


def _speed_table(study: Study, record: Record) -> Table:
    """Counted and timed, with random weights."""
    rows = []
    for row in record.results["rows"]:
        metrics, ratio = row["metrics"], row["spread"]
        costs = (f"{metrics['macs'] / 1e9:.2f}", f"{metrics['paper'] / 1e9:.2f}", f"{metrics['milliseconds']:.0f} ms")
        rows.append((row["row"], row["rate"], *costs, spread(ratio["median"], ratio["low"], ratio["high"])))
    columns = ("", "r", "GFLOPs (MACs)", "as the paper counts", "time of a batch", "speed-up (quartiles)")
    machine = f"{record.machine['cpu']}, {record.machine['threads']} threads"
    text = f"Random weights: timing and counting only. {_caption(record)}, {machine}"
    return Table(study.title, columns, tuple(rows), text)


def _long_table(study: Study, record: Record) -> Table:
    """One line per row and rate."""
    results = record.results
    name, other = LABELS.get(study.metric, study.metric), SECOND.get(study.task, "")
    measure = study.at(results["scale"]).measure
    if measure != "accuracy":
        other = ""
    first = "blocks" if measure == "kendall" else "r"
    full = results["scale"] == "full"
    columns = ["", first, *([f"{name}: paper", "measured", "difference"] if full else [name]), "by seed"]
    if other:
        columns.append(LABELS.get(other, other))
    columns += [f"against {study.reference} (95 %)"]
    counted = measure == "accuracy"
    if counted:
        columns += ["GFLOPs"] if not full else ["GFLOPs: paper", "counted as the paper does"]
    trainings = _trainings(results)
    if differ := _trainings_differ(results):
        columns.append("training")
    rows = []
    for row in results["rows"]:
        rate = row["rate"] if not row["rate"] or row["rate"] == row["r"] else f"{row['rate']} (r = {row['r']})"
        line = [row["row"], rate if measure != "kendall" else row["rate"]]
        line += _metric_cells(study, row, study.metric, full)
        seeds = row["by_seed"][study.metric]
        line.append(", ".join(_number(study.metric, value) for value in seeds) if len(seeds) > 1 else "")
        if other:
            line.append(_number(other, row["metrics"][other]) if other in row["metrics"] else "")
        line.append(_difference(row["against_reference"], study.metric))
        if counted:
            printed = study.paper.find(row["row"], row["rate"]).get("gflops")
            if full:
                line += ["" if printed is None else f"{printed:g}", f"{row['metrics']['paper'] / 1e9:.2f}"]
            else:
                line.append(f"{row['metrics']['macs'] / 1e9:.3g}")
        if differ:
            line.append(trainings.get(row["row"], ""))
        rows.append(tuple(line))
    if full:
        rows += _unmeasured_rows(study, results, len(columns))
    return Table(study.title, tuple(columns), tuple(rows), _caption(record))


def _unmeasured_rows(study: Study, results: Mapping[str, Any], width: int) -> list[tuple[str, ...]]:
    """Rows of the paper without a measurement."""
    measured = {(row["row"], row["rate"]) for row in results["rows"]}
    missing = [tuple(map(str, line[:2])) for line in study.paper.values if tuple(map(str, line[:2])) not in measured]
    rows = []
    for row, rate in missing:
        printed = study.paper.find(row, rate).get(study.metric)
        line = [row, rate, "" if printed is None else _number(study.metric, printed), "not measured"]
        rows.append((*line, *[""] * (width - len(line))))
    return rows


def _matrix_table(study: Study, record: Record) -> Table:
    """One line per row, rates side by side."""
    results = record.results
    full = results["scale"] == "full"
    rates = [rate for rate in dict.fromkeys(row["rate"] for row in results["rows"]) if rate]
    parts = ["paper", "measured", "difference"] if full else ["", f"against {study.reference} (95 %)"]
    columns = ["", *(f"r = {rate}{f': {part}' if part else ''}" for rate in rates for part in parts)]
    by_rate = {(row["row"], row["rate"]): row for row in results["rows"]}
    rows = []
    for label in dict.fromkeys(row["row"] for row in results["rows"] if row["rate"]):
        line = [label]
        for rate in rates:
            row = by_rate.get((label, rate))
            if row is None:
                line += [""] * len(parts)
                continue
            line += _metric_cells(study, row, study.metric, full)
            if not full:
                line.append(_difference(row["against_reference"], study.metric))
        rows.append(tuple(line))
    base = [row for row in results["rows"] if not row["rate"]]
    note = "".join(f" {row['row']}: {_number(study.metric, row['metrics'][study.metric])}." for row in base)
    name = LABELS.get(study.metric, study.metric)
    return Table(f"{study.title}, {name}", tuple(columns), tuple(rows), f"{_caption(record)}.{note}".replace("..", "."))


def _current_claims(study: Study, record: Record) -> list[dict[str, Any]]:
    """Claims of the record that the study still makes, with its present words."""
    return [
        {**tested, "text": claim.text}
        for claim in study.at(record.results["scale"]).claims
        for tested in record.results["claims"]
        if (list(claim.rows), bool(claim.alike)) == (tested["rows"], tested["alike"])
        and (not claim.at or tested["rate"] in claim.at)
    ]


def _claims_table(study: Study, record: Record) -> Table | None:
    claims = _current_claims(study, record)
    if not claims:
        return None
    finer = any("loss" in claim["difference"] for claim in claims) and study.metric != "loss"
    name = LABELS.get(study.metric, study.metric)
    columns = ("statement", "here", "at", f"{name} (95 %)", *(["loss (95 %)"] if finer else []), "does it show?")
    rows = []
    for claim in claims:
        own, other = claim["rows"]
        between = claim["difference"]
        line = [claim["text"], f"{own} − {other}", claim["rate"], _difference(between, study.metric)]
        if finer:
            line.append(_difference(between, "loss"))
        rows.append((*line, claim["verdict"]))
    note = "yes and no: the 95 % interval leaves out zero; it is over images and, with more than one, over seeds."
    return Table("Does it show here?", columns, tuple(rows), f"{_caption(record)}. {note}")


def _metric_cells(study: Study, row: Mapping[str, Any], metric: str, full: bool) -> Sequence[str]:
    """At full scale paper, measured and difference; at small scale the measured value."""
    value = row["metrics"][metric]
    if not full:
        return [_number(metric, value)]
    printed = study.paper.find(row["row"], row["rate"]).get(metric)
    if printed is None:
        return ["", _number(metric, value), ""]
    return [_number(metric, printed), _number(metric, value), f"{value - printed:+.{DIGITS.get(metric, 2)}f}"]


def _number(metric: str, value: float) -> str:
    return f"{value:.{DIGITS.get(metric, 2)}f}"


def _difference(differences: Mapping[str, Any] | None, metric: str) -> str:
    if differences is None or metric not in differences:
        return ""
    digits = DIGITS.get(metric, 2)
    return "{value:+.{d}f} ({low:+.{d}f} … {high:+.{d}f})".format(**differences[metric], d=digits)
