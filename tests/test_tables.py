"""Rows of a report as a table, by the annotations of their fields."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from dtem.tables import Column, Report, Table, table


@dataclass
class Row:
    name: Annotated[str, Column("method")]
    hidden: int
    score: Annotated[float | None, Column("score %", "{:.1f}", missing="–")]
    size: Annotated[int, Column("size", lambda size: f"{size:,}")]
    total: Annotated[int, Column("name and size", lambda row: f"{row.name} {row.size}", of_row=True)] = 0


def test_columns_come_from_annotated_fields_in_their_order() -> None:
    drawn = table("scores", [Row("a", 1, 2.345, 1000), Row("b", 2, None, 5)], "two rows")
    assert (drawn.title, drawn.caption) == ("scores", "two rows")
    assert drawn.columns == ["method", "score %", "size", "name and size"]
    assert drawn.rows == [["a", "2.3", "1,000", "a 1000"], ["b", "–", "5", "b 5"]]


@dataclass(frozen=True, repr=False)
class Numbers(Report):
    name: str
    path: Path
    loss: float
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        return {}

    def parts(self) -> list[Table | str]:
        return []


def test_a_report_is_short_in_a_console() -> None:
    report = Numbers("a", Path("b/c"), 0.5, [Row("a", 1, 2.0, 3)] * 100)
    assert repr(report) == "Numbers(name='a', path='b/c', loss=0.5)"


@pytest.mark.parametrize(
    "name",
    [
        "dtem.evaluation.benchmark:BenchmarkReport",
        "dtem.evaluation.classification:ClassificationReport",
        "dtem.evaluation.compare:ComparisonReport",
        "dtem.evaluation.flops_report:FlopsReport",
        "dtem.evaluation.predict:PredictReport",
        "dtem.exporters.export:ExportReport",
        "dtem.tasks.captioning.generate:CaptionReport",
        "dtem.training.train:TrainReport",
        "dtem.visualise.segmentation:SegmentationVisualisation",
        "dtem.visualise.show:Visualisation",
    ],
)
def test_no_report_shows_all_its_fields(name: str) -> None:
    module, cls = name.split(":")
    assert not getattr(importlib.import_module(module), cls).__dataclass_params__.repr
