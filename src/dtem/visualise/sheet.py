"""Pictures in rows and columns with captions, as one image (`groups.figure` does it as SVG)."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from dtem.errors import DtemError
from dtem.visualise import style

GAP, LINE, SIZE = 12, 20, 15
"""Pixels between pictures, of a line of text, and of its letters."""
Legend = Sequence[tuple[str, tuple[int, int, int]]]
"""Names and their colours."""


def sheet(
    pictures: Sequence[Sequence[Image.Image]],
    rows: Sequence[str],
    captions: Sequence[Sequence[str]],
    legend: Legend = (),
) -> Image.Image:
    """Lay pictures out.

    Args:
        pictures: row by row; all of one size. A shorter row ends earlier.
        rows: heading of each row, in the colour of the method that it begins with.
        captions: under each picture, lines apart by a line break.
        legend: swatches with names below all rows.
    """
    sizes = {picture.size for row in pictures for picture in row}
    if len(sizes) != 1 or len(rows) != len(pictures) or any(map(_differ, pictures, captions)):
        raise DtemError(f"pictures of sizes {sorted(sizes)} in rows of {[len(row) for row in pictures]} make no sheet")
    wide, high = sizes.pop()
    font = ImageFont.load_default(SIZE)
    lines = max((caption.count("\n") + 1 for row in captions for caption in row), default=0)
    step = LINE + high + 4 + lines * LINE + GAP
    texts = [text for row in captions for caption in row for text in caption.split("\n")]
    column = max(wide, *(int(font.getlength(text)) for text in texts)) + GAP
    widest = max(map(len, pictures))
    width = GAP + max(widest * column, *(int(font.getlength(text)) + GAP for text in rows))
    places = _legend_places(legend, font, width)
    drawn = Image.new(
        "RGB", (width, GAP + len(rows) * step + (places[-1][1] + LINE + GAP if places else 0)), _rgb("page")
    )
    pen = ImageDraw.Draw(drawn)
    colours = style.method_colours(rows)
    for y, (heading, row, under) in enumerate(zip(rows, pictures, captions, strict=True)):
        top = GAP + y * step
        pen.text((GAP, top), style.title(heading), fill=_rgb(colours[heading]), font=font, stroke_width=0.3)
        for x, (picture, caption) in enumerate(zip(row, under, strict=True)):
            left = GAP + x * column
            drawn.paste(picture, (left, top + LINE))
            pen.multiline_text((left, top + LINE + high + 4), caption, fill=_rgb("muted"), font=font, spacing=4)
    below = GAP + len(rows) * step
    for (name, colour), (left, top) in zip(legend, places, strict=True):
        pen.rectangle((left, below + top + 2, left + SIZE, below + top + 2 + SIZE), fill=colour, outline=_rgb("line"))
        pen.text((left + SIZE + 6, below + top), name, fill=_rgb("ink"), font=font)
    return drawn


def _differ(row: Sequence[object], captions: Sequence[object]) -> bool:
    return len(row) != len(captions)


def _legend_places(
    legend: Legend, font: "ImageFont.ImageFont | ImageFont.FreeTypeFont", width: int
) -> list[tuple[int, int]]:
    """Left and top of each entry: side by side, and on the next line where the sheet ends."""
    places: list[tuple[int, int]] = []
    left, top = GAP, 0
    for name, _ in legend:
        wide = SIZE + 6 + int(font.getlength(name)) + 2 * GAP
        if left + wide > width and left > GAP:
            left, top = GAP, top + LINE
        places.append((left, top))
        left += wide
    return places


def _rgb(name: str) -> tuple[int, int, int]:
    return style.COLOURS[name].rgb
