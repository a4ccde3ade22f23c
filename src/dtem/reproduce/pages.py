"""All records as one HTML page that holds everything itself, and as the tables of docs/results.md."""

import re
from collections.abc import Mapping
from pathlib import Path

from dtem.measure import record
from dtem.reproduce import plots, specs, summary, tables
from dtem.reproduce.specs import SCALES, Study
from dtem.types import DtemError

MARK = re.compile(r"(<!-- study: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""What stands between is drawn from records."""


def records(folder: Path) -> dict[tuple[str, str], record.Record]:
    """The records of studies in a folder, by study and scale."""
    if not folder.is_dir():
        raise DtemError(f"there are no records at {folder}: `dtem reproduce NAME --out {folder}` makes one")
    found = {}
    for name in specs.names():
        for scale in SCALES:
            path = summary.path_of(folder, name, scale)
            if path.is_file():
                found[name, scale] = record.load(path)
    return found


def page(kept: Mapping[tuple[str, str], record.Record]) -> str:
    """One page of all studies; it fetches nothing."""
    from dtem.visualise import report

    made = report.Page("dtem: the paper's studies")
    made.text(
        "Tables and plots are drawn from records. What was measured at small scale says so: it is not to be compared "
        "with the paper's numbers, only its finding is."
    )
    for name in specs.names():
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
    return made.html()


def fill(text: str, kept: Mapping[tuple[str, str], record.Record]) -> str:
    """A page of the documentation with its tables drawn anew: between ``<!-- study: NAME -->`` and ``<!-- end -->``."""

    def drawn(found: re.Match[str]) -> str:
        study = specs.find(found["name"])
        return f"{found[1]}\n{section(study, kept)}\n\n{found[3]}"

    missing = set(specs.names()) - {found["name"] for found in MARK.finditer(text)}
    if missing:
        raise DtemError(f"the page has no place for {sorted(missing)[0]}: add <!-- study: {sorted(missing)[0]} -->")
    return MARK.sub(drawn, text)


def section(study: Study, kept: Mapping[tuple[str, str], record.Record]) -> str:
    """What is known of one study."""
    parts = [f"The paper: {study.finding}"]
    for scale in SCALES:
        one = kept.get((study.name, scale))
        if one is None or not one.results["rows"]:
            parts.append(f"Not yet measured at {scale} scale.")
        else:
            parts += [table.markdown() for table in tables.tables(study, one)]
    return "\n\n".join(parts)
