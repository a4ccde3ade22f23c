"""A self-contained HTML page: text, tables, plots and pictures. Opening it fetches nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.plot { background: #fff; border-radius: 6px; padding: 0.5rem; max-width: 40rem; }
svg { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; } figcaption { color: GrayText; font-size: 0.9rem; }
@media (max-width: 44rem) { /* a phone: tables and figures keep a size that can be read, and scroll sideways */
  th, td { white-space: nowrap; } .wide svg { max-width: none; width: 44rem; }
  .plot { overflow-x: auto; padding: 0; } .plot svg { max-width: none; width: 30rem; }
  dl { grid-template-columns: 1fr !important; } dt { color: GrayText; }
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; font-size: 0.9rem; } dd { margin: 0; }
"""


@dataclass
class Page:
    """A page in the making: add its parts in order, then take `html`."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, *paragraphs: str) -> None:
        """Plain paragraphs."""
        self._parts.extend(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column to the left, all others to the right."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        self._parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def figure(self, svg: str, caption: str, *, plot: bool = False) -> None:
        """An SVG document with its caption; a `plot` stands on white, whatever the colours of the page."""
        shown = f'<div class="{"plot" if plot else "wide"}">{_inline(svg)}</div>'
        self._parts.append(f"<figure>{shown}<figcaption>{escape(caption)}</figcaption></figure>")

    def facts(self, facts: Mapping[str, str]) -> None:
        """Names and what they stand for."""
        listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
        self._parts.append(f"<dl>{listed}</dl>")

    def html(self) -> str:
        """The whole page. It is well-formed XML as well, so that any tool can read it."""
        title = escape(self.title)
        body = "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
        )


def _inline(svg: str) -> str:
    """An SVG document as part of a page: without prolog, and without metadata that names other places."""
    start = svg.index("<svg")
    return re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
