"""All records as one HTML page that holds everything itself, and as the tables of docs/results.md."""

import re
from collections.abc import Mapping
from pathlib import Path

from dtem.measure import record
from dtem.reproduce import measured, plots, specs, summary, tables
from dtem.reproduce.specs import SCALES, Study
from dtem.types import DtemError

MARK = re.compile(r"(<!-- study: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""What stands between is drawn from records."""
CELL = "reproduce-cell"
"""Records of single cells, which those of studies sum up."""


Studies = Mapping[tuple[str, str], record.Record]
"""Records by study and scale."""


def records(folder: Path) -> tuple[Studies, dict[str, record.Record]]:
    """The records in a folder and inside it: of studies the newest of each, and of other measurements by name."""
    if not folder.is_dir():
        raise DtemError(f"there are no records at {folder}: `dtem reproduce NAME --out {folder}` makes one")
    studies: dict[tuple[str, str], record.Record] = {}
    others: dict[str, record.Record] = {}
    for path in sorted(folder.rglob("*.json")):
        if f'"format": "{record.FORMAT}"' not in path.read_text(encoding="utf-8", errors="replace"):
            continue
        kept = record.load(path)
        if kept.kind == summary.KIND:
            key = kept.results["study"], kept.results["scale"]
            if key not in studies or studies[key].time < kept.time:
                studies[key] = kept
        elif kept.kind != CELL:
            others[path.stem] = kept
    return studies, others


def page(kept: Studies, others: Mapping[str, record.Record]) -> str:
    """One page of all records, studies first, and of those the ones that were measured; it fetches nothing."""
    from dtem.visualise import report

    made = report.Page("dtem: the paper's studies")
    made.text(
        "Tables and plots are drawn from records. What was measured at small scale says so: it is not to be compared "
        "with the paper's numbers, only its finding is."
    )
    measured_ones = {name for name, _ in kept}
    for name in sorted(specs.names(), key=lambda name: name not in measured_ones):
        study = specs.find(name)
        made.heading(study.title)
        made.text(f"The paper: {study.finding}")
        shown = [kept[name, scale] for scale in SCALES if (name, scale) in kept]
        for one in shown:
            if one.results["rows"]:
                svg = plots.draw(study, one).decode()
                made.figure(svg, f"{study.title}, {one.results['scale']} scale", plot=True)
            for table in tables.tables(study, one):
                made.text(table.title)
                made.table(table.columns, table.rows)
                made.text(table.caption)
            made.facts({"command": " ".join(one.command), "machine": str(one.machine["cpu"]), "time": one.time})
        if not shown:
            made.text("Not yet measured.")
    for name, one in others.items():
        made.heading(f"Other measurements: {name.replace('_', ' ')}")
        if found := measured.table(name, one):
            made.table(found.columns, found.rows)
            made.text(found.caption)
        made.facts({"command": " ".join(one.command), "time": one.time})
    return made.html()


def fill(text: str, kept: Studies) -> str:
    """A page of the documentation with its tables drawn anew: between ``<!-- study: NAME -->`` and ``<!-- end -->``."""

    def drawn(found: re.Match[str]) -> str:
        study = specs.find(found["name"])
        return f"{found[1]}\n{section(study, kept)}\n\n{found[3]}"

    missing = set(specs.names()) - {found["name"] for found in MARK.finditer(text)}
    if missing:
        raise DtemError(f"the page has no place for {sorted(missing)[0]}: add <!-- study: {sorted(missing)[0]} -->")
    return MARK.sub(drawn, text)


def section(study: Study, kept: Studies) -> str:
    """What is known of one study."""
    parts = [f"The paper: {study.finding}"]
    for scale in SCALES:
        one = kept.get((study.name, scale))
        if one is None or not one.results["rows"]:
            parts.append(f"Not yet measured at {scale} scale.")
        else:
            parts += [table.markdown() for table in tables.tables(study, one)]
    return "\n\n".join(parts)
