"""Rows of a report as a table, by the annotations of their fields."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from dtem.evaluation.captioning import CaptioningReport, CaptioningRow
from dtem.evaluation.classification import ClassificationReport, ClassificationRow
from dtem.evaluation.segmentation import SegmentationReport, SegmentationRow
from dtem.measure.statistics import Difference
from dtem.tables import WIDTH, Column, Report, Table, render, table
from dtem.tasks.captioning import metric
from dtem.tasks.classification.outcomes import Paired


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


def lines_of(drawn: Table) -> list[str]:
    lines = render(drawn).splitlines()
    assert max(map(len, lines)) <= WIDTH
    return lines


def test_tables_fit_100_columns_with_every_number_whole() -> None:
    interval = "-12.60 (-13.97 … -11.23)"
    columns = ("method", "r", *(f"points against method {index} (95 %)" for index in range(5)), "a text")
    cells = [("token_pooling", "0.65G", *[interval] * 5, "some words " * 9), ("tome", "8", *[""] * 5, "few words")]
    lines = lines_of(Table("a title", columns, cells, "a caption " * 15))
    text = "\n".join(lines)
    assert text.count(interval) == 5
    assert text.count("token_pooling  0.65G") == 3, "each part has the columns that tell rows apart"
    assert text.count("a title") == 1
    assert text.split().count("caption") == 15
    assert text.split().count("some") == 9
    assert "…-" not in text.replace(interval, "")


def test_names_of_columns_are_folded_where_they_must_be() -> None:
    names, row = ("", *["cross-entropy of all"] * 6, "top-1 %"), ("a", *["1.1769"] * 6, "74.40")
    (*_, head, _, values) = lines_of(Table("t", names, [row]))
    assert values.split() == list(row)
    assert head.split() == [*["of", "all"] * 6, "top-1", "%"]
    assert len(values.rstrip()) < 80
    (*_, head, _, values) = lines_of(Table("t", names[:3], [row[:3]]))
    assert head.split() == ["cross-entropy", "of", "all"] * 2, "there is room for whole names"


def test_a_narrow_table_stays_one() -> None:
    lines = lines_of(Table("t", ("method", "r", "x"), [("tome", "8", "1"), ("dtem", "8", "2")]))
    assert sum("method" in line for line in lines) == 1


def captioning_rows(count: int) -> list[CaptioningRow]:
    scores: dict[str, Any] = dict.fromkeys(metric.NAMES, 44.4) | {"SPICE": "needs Stanford CoreNLP"}
    pair = {"CIDEr": Difference(-2.6, -3.9, -1.2)}
    return [CaptioningRow("dtem", "13", scores, 2.1, 16_820_000_000, 0, 41, 12.3, pair, pair)] * count


def test_the_widest_reports_fit_too() -> None:
    between, finer = Difference(-12.6, -13.97, -11.23), Difference(-0.0853, -0.1122, -0.0583)
    pair = Paired(1000, between, 123, 156, 1.2e-12, finer)
    quartiles = (600_000_000, 700_000_000)
    row = ClassificationRow(
        "token_pooling", "0.65G", 72.4, 91.7, 1.18, 640_000_000, 650_000_000, quartiles, 1e3, 9, pair
    )
    shared: dict[str, Any] = {
        "model": "m",
        "data": "d",
        "images": 9,
        "device": "cpu",
        "dtype": "float32",
        "outcomes": {},
    }
    classifiers = ClassificationReport(
        **shared, rows=[row], against_tome={("token_pooling", "0.65G"): pair}, image=(3, 224, 224), batch_size=64,
        left_out=0, listed={}, unreadable={},
    )  # fmt: skip
    segmenter = SegmentationRow(
        "token_pooling", "40%", 56.1, 90.5, 60.0, [91.6] * 2, 7_020_423_552, 0, 4.9, between, between
    )
    segmenters = SegmentationReport(**shared, rows=[segmenter] * 9, classes=["road", "sign_symbol"])
    captioners = CaptioningReport(**shared, rows=captioning_rows(3), num_beams=4, unreadable={}, left_out=0)
    texts = {}
    for report in (classifiers, segmenters, captioners):
        tables = [part for part in report.parts() if isinstance(part, Table)]
        texts[type(report)] = "\n".join("\n".join(lines_of(each)) for each in tables)
        for each in tables:
            assert all(cell in texts[type(report)] for row in each.rows for cell in row)
    assert texts[SegmentationReport].count("91.6") == 18
    assert "SPICE needs Stanford CoreNLP: run once" in texts[CaptioningReport]


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
