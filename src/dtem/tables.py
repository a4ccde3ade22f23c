"""Results that print as tables, in a terminal and in a notebook."""

import html
import io
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

WIDTH = 100
"""Letters of a line that goes into a file, a pipe or a string."""
TEXT, GAP = 32, 2
"""Letters of a cell from which on it is a text that may be folded, and between columns."""


@dataclass(frozen=True)
class Table:
    """Rows of text under column names. The first `left` columns are aligned to the left, all others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str | None = None
    left: int = 1

    def as_rich(self, width: int) -> list[Any]:
        """What rich draws: title, table, caption. Where the table is wider than `width`, several of its columns each,
        all with those that tell rows apart.

        Names of columns are folded where the table would not fit otherwise; of cells, only long texts are.
        """
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        widths = [max(self._width(index), len(self.columns[index])) for index in range(len(self.columns))]
        if sum(widths) + GAP * len(widths) > width:
            widths = [self._width(index) for index in range(len(self.columns))]
        parts: list[Any] = [Text(self.title, style="bold")]
        for group in self._groups(widths, width):
            drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0))
            for index in group:
                name = "\n".join(textwrap.wrap(_unbroken(self.columns[index]), widths[index]))
                drawn.add_column(
                    name.replace("\u00a0", " ").replace("\u2011", "-"),
                    justify="left" if index < self.left else "right",
                    no_wrap=not self._is_text(index),
                    min_width=widths[index],
                )
            for row in self.rows:
                drawn.add_row(*(row[index] for index in group))
            parts.append(drawn)
        return [*parts, *([Text(self.caption)] if self.caption else [])]

    def _cells(self, index: int) -> int:
        """Letters of the longest cell of a column."""
        return max((len(line) for row in self.rows for line in row[index].split("\n")), default=0)

    def _is_text(self, index: int) -> bool:
        """Whether the cells of a column may be folded."""
        return self._cells(index) > TEXT and any(" " in row[index] for row in self.rows)

    def _width(self, index: int) -> int:
        """Of a column: of its cells, of a text as much as it needs at least, and of the longest word of its name."""
        cells = TEXT if self._is_text(index) else self._cells(index)
        return max([cells, *map(len, re.split("(?<=-)| ", _unbroken(self.columns[index])))])

    def _groups(self, widths: list[int], width: int) -> list[list[int]]:
        """Columns of each part."""
        keys = list(range(max(self.left, 2 if self.columns[1:2] and self.columns[1] in ("r", "budget") else 1)))
        groups, room = [list(keys)], width - sum(widths[key] + GAP for key in keys)
        left = room
        for index in range(len(keys), len(self.columns)):
            if widths[index] + GAP > left and len(groups[-1]) > len(keys):
                groups.append(list(keys))
                left = room
            groups[-1].append(index)
            left -= widths[index] + GAP
        return groups

    def as_html(self) -> str:
        """The table for a notebook."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        note = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return f"<table><caption>{html.escape(self.title)}</caption><tr>{head}</tr>{body}</table>{note}"

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Column:
    """How `table` shows a field of a row, ``top1: Annotated[float, Column("top-1 %", "{:.2f}")]``."""

    header: str
    show: str | Callable[[Any], str] = "{}"
    """A format, or a function, of the value."""
    missing: str = ""
    """Shown for None."""
    of_row: bool = False
    """`show` takes the whole row."""
    optional: bool = False
    """Left out of a table in which all values are None."""

    def cell(self, row: Any, name: str) -> str:
        """The field `name` of `row` as text."""
        value = row if self.of_row else getattr(row, name)
        if value is None:
            return self.missing
        return self.show.format(value) if isinstance(self.show, str) else self.show(value)


def table(title: str, rows: Sequence[Any], caption: str | None = None) -> Table:
    """Rows of one type, with those of their fields that are annotated with a `Column`."""
    hints = get_type_hints(type(rows[0]), include_extras=True)
    columns = {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if not (each.optional and all(getattr(row, name) is None for row in rows))
    }
    cells = [[column.cell(row, name) for name, column in columns.items()] for row in rows]
    return Table(title, [column.header for column in columns.values()], cells, caption)


class Report(ABC):
    """The outcome of a public function: typed fields, `to_dict` for JSON, tables for people."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""

    @abstractmethod
    def parts(self) -> list[Table | str]:
        """Tables and lines, in the order in which they are shown."""

    def __str__(self) -> str:
        return render(*self.parts())

    def __repr__(self) -> str:
        """The fields that are text, numbers or paths."""
        fields = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        shown = [f"{name}={value!r}" for name, value in fields.items() if isinstance(value, str | int | float)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return "".join(
            part.as_html() if isinstance(part, Table) else f"<p>{html.escape(part)}</p>" for part in self.parts()
        )


def _unbroken(name: str) -> str:
    """With a space before a percent sign, and a hyphen before a digit, at which no line ends."""
    return re.sub(r"-(?=\d)", "\u2011", name.replace(" %", "\u00a0%"))


def render(*parts: Table | str, file: Any = None, width: int | None = WIDTH) -> str:
    """Tables and lines as text; into `file` if one is given. `width` None: that of the terminal."""
    from rich.console import Console

    out = io.StringIO() if file is None else file
    console = Console(file=out, width=width, markup=False, highlight=False)
    for part in parts:
        for drawn in part.as_rich(console.width) if isinstance(part, Table) else [part]:
            console.print(drawn)
    return out.getvalue().rstrip() if file is None else ""


def giga(operations: float) -> str:
    """Operations in billions, three digits or more."""
    return f"{operations / 1e9:.2f}" if operations >= 1e9 else f"{operations / 1e9:.3g}"


def spread(median: float, low: float, high: float) -> str:
    """A median with its quartiles."""
    return f"{median:.2f} ({low:.2f}–{high:.2f})"
