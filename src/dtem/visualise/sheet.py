"""Pictures in rows and columns with captions, as one image (`groups.figure` does it as SVG)."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from dtem.errors import DtemError

GAP, LINE, SIZE = 12, 20, 15
"""Pixels between pictures, of a line of text, and of its letters."""


def sheet(
    pictures: Sequence[Sequence[Image.Image]], rows: Sequence[str], captions: Sequence[Sequence[str]]
) -> Image.Image:
    """Lay pictures out.

    Args:
        pictures: row by row; all of one size, all rows equally long.
        rows: heading of each row.
        captions: under each picture, lines apart by a line break.
    """
    sizes = {picture.size for row in pictures for picture in row}
    if len(sizes) != 1 or len({len(row) for row in pictures}) != 1 or len(rows) != len(pictures):
        raise DtemError(f"pictures of sizes {sorted(sizes)} in rows of {[len(row) for row in pictures]} make no sheet")
    wide, high = sizes.pop()
    font = ImageFont.load_default(SIZE)
    lines = max((caption.count("\n") + 1 for row in captions for caption in row), default=0)
    step = LINE + high + 4 + lines * LINE + GAP
    texts = [text for row in captions for caption in row for text in caption.split("\n")]
    column = max(wide, *(int(font.getlength(text)) for text in texts)) + GAP
    width = GAP + max(len(pictures[0]) * column, *(int(font.getlength(text)) + GAP for text in rows))
    drawn = Image.new("RGB", (width, GAP + len(rows) * step), "white")
    pen = ImageDraw.Draw(drawn)
    for y, (heading, row, under) in enumerate(zip(rows, pictures, captions, strict=True)):
        top = GAP + y * step
        pen.text((GAP, top), heading, fill="black", font=font)
        for x, (picture, caption) in enumerate(zip(row, under, strict=True)):
            left = GAP + x * column
            drawn.paste(picture, (left, top + LINE))
            pen.multiline_text((left, top + LINE + high + 4), caption, fill="#444", font=font, spacing=4)
    return drawn
