"""Measurements behind the tables of the docs. Run from the repository root: ``python -m benchmarks.NAME``.

Each script writes a record into ``benchmarks/results``; ``benchmarks.tables`` and ``benchmarks.report`` draw the tables
of the docs from the records. `benchmarks.reproduce` runs the studies of the paper.
"""
