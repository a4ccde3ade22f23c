"""All records as one self-contained HTML page, or as the tables of a Markdown page.

Studies of benchmarks.reproduce come first, then other measurements. In a Markdown page, everything between
<!-- study: NAME --> and <!-- end --> is replaced by the study's tables.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.reproduce import specs, study_plots
from benchmarks.reproduce.specs import CELL_RECORD, SCALES, STUDY_RECORD, Study
from benchmarks.reproduce.study_tables import as_markdown, study_tables
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.measure import record
from dtem.tables import Table
from dtem.visualise import curves

EXAMPLES = """\
examples:
  python -m benchmarks.report --out report.html
  python -m benchmarks.report --records runs/records --out report.html
  python -m benchmarks.report --docs docs/research/results.md             update its tables
  python -m benchmarks.report --docs docs/research/results.md --check     exit 1 if they differ from the records
"""
MARK = re.compile(r"(<!-- study: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

StudyRecords = Mapping[tuple[str, str], record.Record]
"""Records by study and scale."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--records", metavar="DIR", type=Path, default=common.RESULTS, help="default benchmarks/results")
    add("--out", metavar="FILE", help="the HTML page; default dtem-report.html, unless --docs is given")
    add("--docs", metavar="FILE", type=Path, help="a Markdown page whose tables to update")
    add("--check", action="store_true", help="change nothing; exit 1 if --docs differs from the records")
    args = parser.parse_args(argv)
    return common.run(lambda: report(args.records, args.out, args.docs, args.check))


def report(folder: Path, out: str | None = None, docs: Path | None = None, check: bool = False) -> int:
    """Write the page, or update or check the tables of `docs`. Returns the exit code."""
    if check and docs is None:
        raise DtemError("--check goes with --docs: name the page to check")
    studies, others = load_records(folder)
    code = 0
    if docs is not None:
        code = int(update_docs(docs, studies, check))
    elif out is None:
        out = "dtem-report.html"
    if out is not None:
        write_file(out, html_page(studies, others))
        print(f"{len(studies) + len(others)} records: {out}")
    return code if check else 0


def update_docs(page: Path, studies: StudyRecords, check: bool) -> bool:
    """Update the tables of a Markdown page, or check them only. Returns whether they differed from the records."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DtemError(f"--docs {page} cannot be read: {error.strerror}") from error
    updated = fill(text, studies)
    if check:
        state = "differs from" if updated != text else "agrees with"
        print(f"{page} {state} the records{': run it without --check' if updated != text else ''}")
    elif updated != text:
        write_file(page, updated)
        print(f"updated: {page}")
    return updated != text


def load_records(folder: Path) -> tuple[StudyRecords, dict[str, record.Record]]:
    """Records below a folder: the newest of each study and scale, and other measurements by file name."""
    if not folder.is_dir():
        raise DtemError(
            f"there are no records at {folder}: `python -m benchmarks.reproduce NAME --out {folder}` writes one"
        )
    studies: dict[tuple[str, str], record.Record] = {}
    others: dict[str, record.Record] = {}
    for path in sorted(folder.rglob("*.json")):
        if f'"format": "{record.FORMAT}"' not in path.read_text(encoding="utf-8", errors="replace"):
            continue
        loaded = record.load_record(path)
        if loaded.kind == STUDY_RECORD:
            key = loaded.results["study"], loaded.results["scale"]
            if key not in studies or studies[key].time < loaded.time:
                studies[key] = loaded
        elif loaded.kind != CELL_RECORD:  # the study's record has it
            others[path.stem] = loaded
    return studies, others


def html_page(studies: StudyRecords, others: Mapping[str, record.Record]) -> str:
    """One page of all records: measured studies, other studies in one line, other measurements."""
    from dtem.visualise import html_page

    page = html_page.Page("dtem: the paper's studies")
    page.text(
        "Tables and plots are drawn from records. Numbers measured at small scale are marked: compare their finding "
        "with the paper's, not their values."
    )
    measured = [name for name in specs.names() if any((name, scale) in studies for scale in SCALES)]
    if missing := [specs.find(name).title for name in specs.names() if name not in measured]:
        page.text(f"Not yet measured: {'; '.join(missing)}.")
    for name in measured:
        study = specs.find(name)
        page.heading(study.title)
        page.text(f"The paper: {study.finding}")
        for scale in SCALES:
            if (name, scale) in studies:
                _add_study(page, study, studies[name, scale])
    for name, other in others.items():
        if table := rows_table(name, other):
            page.heading(f"Other measurements: {name.replace('_', ' ')}")
            page.table(table.columns, table.rows)
            page.text(table.caption)
            page.facts({"command": " ".join(other.command), "time": other.time})
    return page.html()


def _add_study(page: Any, study: Study, measured: record.Record) -> None:
    if measured.results["rows"]:
        drawn = curves.for_page(study_plots.panels(study, measured))
        page.plot(drawn, f"{study_plots.title(study, measured)}. {study_plots.caption(study, measured)}")
    for table in study_tables(study, measured):
        page.subheading(table.title)
        page.table(table.columns, table.rows)
        page.text(table.caption)
    command = " ".join(measured.command)
    page.facts({"command": command, "machine": str(measured.machine["cpu"]), "time": measured.time})


def fill(text: str, studies: StudyRecords) -> str:
    """A Markdown page with everything between ``<!-- study: NAME -->`` and ``<!-- end -->`` replaced."""
    missing = sorted(set(specs.names()) - {mark["name"] for mark in MARK.finditer(text)})
    if missing:
        raise DtemError(f"the page has no place for {missing[0]}: add <!-- study: {missing[0]} --> and <!-- end -->")
    return MARK.sub(lambda mark: f"{mark[1]}\n{section(specs.find(mark['name']), studies)}\n\n{mark[3]}", text)


def section(study: Study, studies: StudyRecords) -> str:
    """Finding and tables of one study."""
    parts = [f"The paper: {study.finding}"]
    for scale in SCALES:
        measured = studies.get((study.name, scale))
        if measured is None or not measured.results["rows"]:
            parts.append(f"Not yet measured at {scale} scale.")
        else:
            parts += [as_markdown(table) for table in study_tables(study, measured)]
    return "\n\n".join(parts)


def rows_table(name: str, measured: record.Record) -> Table | None:
    """The rows of a measurement as a table, one column per name; None if it has no rows."""
    rows = measured.results.get("rows") if isinstance(measured.results, Mapping) else measured.results
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    lines = [_flat(row) for row in rows]
    columns = tuple(dict.fromkeys(column for line in lines for column in line))
    cells = tuple(tuple(line.get(column, "") for column in columns) for line in lines)
    return Table(name, columns, cells, common.provenance(measured))


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as text: a spread in one cell, other nested values as columns of their own."""
    cells: dict[str, str] = {}
    for name, value in row.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping) and {"low", "high"} <= value.keys():
            middle = value.get("median", value.get("value", 0.0))
            cells[label] = f"{_text(middle)} ({_text(value['low'])} … {_text(value['high'])})"
        elif isinstance(value, Mapping):
            cells |= _flat(value, f"{label} ")
        else:
            cells[label] = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
    return cells


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
