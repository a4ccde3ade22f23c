"""Results that print as tables, in a terminal and in a notebook."""

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Table:
    """Rows of text under column names. The first `left` columns are aligned to the left, all others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str | None = None
    left: int = 1

    def as_rich(self) -> Any:
        """The table for rich to draw."""
        from rich import box
        from rich.table import Table as RichTable

        drawn = RichTable(
            title=self.title, caption=self.caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left"
        )
        for index, column in enumerate(self.columns):
            drawn.add_column(column, justify="left" if index < self.left else "right")
        for row in self.rows:
            drawn.add_row(*row)
        return drawn

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


def render(*parts: Table | str, file: Any = None, width: int | None = 160) -> str:
    """Tables and lines as text; into `file` if one is given. `width` None: that of the terminal."""
    from rich.console import Console

    out = io.StringIO() if file is None else file
    console = Console(file=out, width=width, markup=False, highlight=False)
    for part in parts:
        console.print(part.as_rich() if isinstance(part, Table) else part)
    return out.getvalue().rstrip() if file is None else ""


def giga(operations: float) -> str:
    """Operations in billions, three digits or more."""
    return f"{operations / 1e9:.2f}" if operations >= 1e9 else f"{operations / 1e9:.3g}"


def spread(median: float, low: float, high: float) -> str:
    """A median with its quartiles."""
    return f"{median:.2f} ({low:.2f}–{high:.2f})"
