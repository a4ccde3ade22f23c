"""Rows of a report as a table, by the annotations of their fields."""

from dataclasses import dataclass
from typing import Annotated

from dtem.tables import Column, table


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
