"""All records as one HTML page, those of `dtem reproduce` first; and as the tables of a page of documentation.

The page holds everything itself: tables, plots, and how each number was got. In a Markdown page, what stands between
<!-- study: NAME --> and <!-- end --> is drawn anew.
"""

import argparse
from pathlib import Path
from typing import Any

from dtem.cli import common

NAME = "report"
HELP = "all records as one HTML page"
EXAMPLES = """\
examples:
  dtem report --out report.html
  dtem report --records runs/records --out report.html
  dtem report --docs docs/results.md                              draw its tables anew
  dtem report --docs docs/results.md --check                      exit 1 if they are not what the records say
"""
RECORDS = "benchmarks/results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add(
        "--records",
        metavar="DIR",
        default=RECORDS,
        help="what `dtem reproduce --out` and others wrote; default %(default)s",
    )
    add("--out", metavar="FILE", help="the page; default dtem-report.html, unless --docs is given")
    add("--docs", metavar="FILE", help="a Markdown page whose tables to draw anew")
    add("--check", action="store_true", help="change nothing; exit 1 if --docs is not in step with the records")


def run(args: argparse.Namespace) -> int:
    """Write the page, or the tables."""
    from dtem.files import write_file
    from dtem.reproduce import pages
    from dtem.types import DtemError

    if args.check and args.docs is None:
        raise DtemError("--check goes with --docs: which page is to be in step with the records?")
    records, others = pages.records(Path(args.records))
    names = [*(f"{name}-{scale}" for name, scale in records), *others]
    document: dict[str, Any] = {"records": names, "out": None, "stale": None}
    lines, code = [], 0
    if args.docs is not None:
        try:
            text = Path(args.docs).read_text(encoding="utf-8")
        except OSError as error:
            raise DtemError(f"--docs {args.docs} cannot be read: {error.strerror}") from error
        drawn = pages.fill(text, records)
        document["stale"] = drawn != text
        if args.check:
            code = int(drawn != text)
            state = "not in step" if code else "in step"
            lines.append(f"{args.docs} is {state} with the records{': run dtem report --docs' if code else ''}")
        elif drawn != text:
            write_file(args.docs, drawn)
            lines.append(f"tables drawn anew: {args.docs}")
    out = args.out or (None if args.docs else "dtem-report.html")
    if out is not None:
        write_file(out, pages.page(records, others))
        document["out"] = out
        lines.append(f"{len(names)} records: {out}")
    common.show(args, document, *lines)
    return code
