"""Printing results: tables for people, one JSON document with --json."""

import json
from argparse import Namespace

from dtem.tables import WIDTH, Report, Table, render


def print_report(args: Namespace, report: Report) -> None:
    """The report on stdout, as a table or as JSON."""
    print_parts(args, report.to_dict(), *report.parts())


def print_parts(args: Namespace, document: object, *parts: Table | str) -> None:
    """`document` with --json, else the parts. Into a file or pipe, tables have their own width."""
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), file=args.stdout)
        return
    render(*parts, file=args.stdout, width=None if args.stdout.isatty() else WIDTH)
