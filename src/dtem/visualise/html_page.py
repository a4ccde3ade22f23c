"""A self-contained HTML page: text, tables, plots and pictures. Opening it fetches nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from PIL import Image

from dtem.visualise import groups, style

PLOT_STYLE = """
.plot { max-width: 44rem; } .plot svg { width: 100%; height: auto; display: block; } .plot .narrow { display: none; }
.plot.panels { max-width: none; } .plot svg > g > g:first-child > path { fill: none !important; } /* the ground */
@media (max-width: 40rem) { .plot .wide { display: none; } .plot .narrow { display: block; max-width: 26rem; } }
"""
RIGHT, WRONG = style.COLOURS["green"].light, style.COLOURS["red"].light
"""Ground of a prediction on a picture, in both schemes."""
SMALL = 200
"""Pixels of a picture below which its pixels are drawn as squares."""
LONG = 24
"""Letters of a cell from which on it may take several lines."""
FOLDED = 40
"""Rows of a table from which on it is folded."""
_STYLE = f"""
{style.variables()}
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 {style.FONT}; color: var(--dtem-ink); background: var(--dtem-page); max-width: 62rem;
  margin: 0 auto; padding: {4 * style.SPACE}px {2 * style.SPACE}px {8 * style.SPACE}px; overflow-wrap: break-word; }}
h1 {{ font-size: 1.75rem; line-height: 1.2; margin: 0 0 {2 * style.SPACE}px; }}
h2 {{ font-size: 1.3rem; line-height: 1.3; margin: {6 * style.SPACE}px 0 {style.SPACE}px; }}
h3 {{ font-size: 1rem; margin: {3 * style.SPACE}px 0 {style.SPACE}px; }}
p {{ max-width: 46rem; margin: 0 0 {2 * style.SPACE}px; }}
.scroll {{ overflow-x: auto; margin: 0 0 {2 * style.SPACE}px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; width: 100%; }}
th, td {{ padding: 5px {style.SPACE}px; text-align: right; border-bottom: 1px solid var(--dtem-line);
  vertical-align: top; }}
th {{ color: var(--dtem-muted); font-weight: 600; vertical-align: bottom; }}
th:first-child, td:first-child, .text {{ text-align: left; }} td {{ white-space: nowrap; }}
td.text {{ white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }}
summary {{ cursor: pointer; color: var(--dtem-blue); margin: 0 0 {style.SPACE}px; }}
figure {{ margin: {2 * style.SPACE}px 0; }}
figcaption, .note {{ color: var(--dtem-muted); font-size: 0.9rem; max-width: 46rem; }}
svg {{ max-width: 100%; height: auto; }}
dl {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px {2 * style.SPACE}px;
  font-size: 0.9rem; margin: 0 0 {2 * style.SPACE}px; }}
dt {{ color: var(--dtem-muted); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.headline {{ background: var(--dtem-card); border-left: 5px solid var(--dtem-blue); border-radius: {style.RADIUS}px;
  padding: {2 * style.SPACE}px {3 * style.SPACE}px; margin: 0 0 {3 * style.SPACE}px; }}
.headline p {{ font-size: 1.6rem; line-height: 1.3; font-weight: 650; margin: 0; max-width: none; }}
.headline .note {{ font-size: 0.9rem; font-weight: normal; margin: {style.SPACE}px 0 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: {style.SPACE}px; max-width: 46rem; }}
.tile {{ min-width: 0; font-size: 0.85rem; color: var(--dtem-muted); }}
.tile b {{ color: var(--own); }}
.tile div {{ position: relative; margin: 2px 0; }}
.tile img {{ width: 100%; display: block; border-radius: 4px; }}
.tile img.small {{ image-rendering: pixelated; }}
.tile span {{ position: absolute; left: 4px; bottom: 4px; max-width: calc(100% - 8px); box-sizing: border-box;
  padding: 1px {style.SPACE}px; border-radius: 4px; color: #fff; background: {RIGHT}; font-weight: 600;
  overflow-wrap: anywhere; line-height: 1.35; }}
.tile span.wrong {{ background: {WRONG}; }}
{PLOT_STYLE}
@media (max-width: 40rem) {{
  .headline p {{ font-size: 1.25rem; }} .tiles {{ gap: 4px; }} .tile {{ font-size: 0.72rem; }}
  .tile span {{ padding: 0 4px; }}
  dl {{ grid-template-columns: minmax(0, 1fr); }} dd {{ margin-bottom: {style.SPACE}px; }}
}}
"""


class Tile(NamedTuple):
    """A picture with what a method predicts written on it."""

    method: str
    picture: Image.Image
    prediction: str
    right: bool
    below: str = ""
    """A line under the picture."""


@dataclass
class Page:
    """A page in the making: add its parts in order, then take `html`."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def subheading(self, text: str) -> None:
        """Begin a part of a section."""
        self._parts.append(f"<h3>{escape(text)}</h3>")

    def text(self, *paragraphs: str) -> None:
        """Plain paragraphs."""
        self._parts.extend(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Texts to the left, numbers to the right. Columns in which nothing stands are left out; a long table is
        folded.
        """
        filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]
        left = {index for index in filled if any(_is_long(row[index]) for row in rows)}

        def line(tag: str, cells: Sequence[str]) -> str:
            marked = ((' class="text"' if index in left else "", escape(cells[index])) for index in filled)
            return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in marked) + "</tr>"

        body = "".join(line("td", row) for row in rows)
        head = line("th", columns)
        table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
        if len(rows) > FOLDED:
            table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
        self._parts.append(table)

    def figure(self, svg: str, caption: str) -> None:
        """An SVG document with its caption."""
        self.plot(f'<div class="scroll">{style.themed(svg)}</div>', caption)

    def plot(self, drawn: str, caption: str) -> None:
        """A plot of `curves.for_page` with its caption."""
        self._parts.append(f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>")

    def headline(self, text: str, note: str) -> None:
        """The outcome in one sentence, and what its numbers are."""
        self._parts.append(f'<div class="headline"><p>{escape(text)}</p><p class="note">{escape(note)}</p></div>')

    def tiles(self, tiles: Sequence[Tile], caption: str) -> None:
        """Pictures side by side."""
        shown = "".join(map(_tile, tiles))
        self._parts.append(
            f'<figure><div class="tiles">{shown}</div><figcaption>{escape(caption)}</figcaption></figure>'
        )

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


def _is_long(cell: str) -> bool:
    """Whether a cell is a text that may need several lines."""
    return len(cell) > LONG * (1 if " " in cell and cell[0] not in "+-0123456789" else 2)


def _tile(tile: Tile) -> str:
    own = style.method_colours([tile.method])[tile.method]
    picture, mark = groups.data_uri(tile.picture), "✓" if tile.right else "✗"
    small = ' class="small"' if tile.picture.width < SMALL else ""
    alt = f"{style.title(tile.method)}: {tile.prediction}, {'right' if tile.right else 'wrong'}"
    return (
        f'<div class="tile" style="--own: var(--dtem-{own})"><b>{escape(style.title(tile.method))}</b><div>'
        f'<img src="{picture}" alt="{escape(alt)}"{small}/>'
        f'<span class="{"right" if tile.right else "wrong"}">{mark} {escape(tile.prediction)}</span></div>'
        f"{escape(tile.below)}</div>"
    )
