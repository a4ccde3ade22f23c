"""The look of all pictures and pages: colours, one per method everywhere, type and spacing, light and dark.

An SVG is drawn in light colours. `themed` turns them into variables, which `variables` defines for a page in both
schemes; `standalone` puts these definitions into the SVG itself.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light and on a dark page, as ``#rrggbb``."""

    light: str
    dark: str

    @property
    def rgb(self) -> tuple[int, int, int]:
        """The light one, for pictures that have one scheme."""
        red, green, blue = bytes.fromhex(self.light[1:])
        return red, green, blue


COLOURS = {
    "ink": Colour("#1b1f24", "#e6e9ed"),
    "muted": Colour("#59626e", "#a3adb9"),
    "line": Colour("#d3d8de", "#3a424c"),
    "card": Colour("#f5f6f8", "#1d2127"),
    "page": Colour("#ffffff", "#14171b"),
    "blue": Colour("#1d5fd1", "#7eabff"),
    "orange": Colour("#b4500b", "#f2a25c"),
    "purple": Colour("#7b3fb5", "#c8a0f5"),
    "magenta": Colour("#b0246d", "#f28cc0"),
    "olive": Colour("#6a6a00", "#c9cb5e"),
    "teal": Colour("#0b7370", "#4ecbc2"),
    "brown": Colour("#84492a", "#d6a685"),
    "green": Colour("#2f7532", "#82d07f"),
    "red": Colour("#c02626", "#ff8f87"),
}
"""All but ``line`` can be read as text on ``page`` and on ``card``."""
HUES = ("blue", "orange", "purple", "magenta", "olive", "teal", "brown", "green")
"""For what has no colour of its own, in this order."""
METHODS = {
    "unmerged": "muted",
    "dtem": "blue",
    "tome": "orange",
    "evit": "purple",
    "etps": "magenta",
    "ats": "olive",
    "evo_vit": "teal",
    "bat": "brown",
    "token_pooling": "green",
}
TITLES = {
    "ats": "ATS",
    "bat": "BAT",
    "diffrate": "DiffRate",
    "dtem": "DTEM",
    "dtps": "dTPS",
    "dynamicvit": "DynamicViT",
    "etps": "eTPS",
    "evit": "EViT",
    "evo_vit": "Evo-ViT",
    "patch_merger": "PatchMerger",
    "token_pooling": "Token Pooling",
    "tome": "ToMe",
}
"""Names of methods as their papers write them."""
MARKERS = "osD^vPX*"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
SPACE, RADIUS = 8, 8
"""Pixels: all distances are multiples of the one, all corners are rounded by the other."""

FILE_FONT = "'DejaVu Sans', Verdana, sans-serif"
"""In files; labels are placed with the widths of the first."""


def title(name: str) -> str:
    """A label as it is written in pictures: a method that it begins with, as its paper writes it."""
    method = _method(name)
    return TITLES[method] + name[len(method) :] if method in TITLES else name


def method_colours(names: Iterable[str]) -> dict[str, str]:
    """By method, the name of its colour: its own, or for other labels one that no method among `names` has.

    A label beginning with a method, such as ``dtem, r = 8``, takes that method's colour unless another label has it.
    """
    labels = list(dict.fromkeys(names))
    chosen = {name: METHODS[name] for name in labels if name in METHODS}
    for name in labels:
        own = METHODS.get(_method(name))
        if name not in chosen and own is not None and own not in chosen.values():
            chosen[name] = own
    free = [hue for hue in HUES if hue not in chosen.values()] or list(HUES)
    others = [name for name in labels if name not in chosen]
    chosen |= {name: free[index % len(free)] for index, name in enumerate(others)}
    return {name: chosen[name] for name in labels}


def _method(label: str) -> str:
    """The word that a label begins with."""
    return re.split(r"[^a-z_]", label, maxsplit=1)[0]


def colour(name: str) -> Colour:
    """The colour of a method."""
    return COLOURS[method_colours([name])[name]]


def variables(dark: str = "@media (prefers-color-scheme: dark) { :root { %s } }") -> str:
    """CSS that defines ``--dtem-NAME`` for every colour.

    Args:
        dark: rule of the dark scheme, with ``%s`` for the definitions.
    """
    light, night = (
        " ".join(f"--dtem-{name}: {getattr(each, scheme)};" for name, each in COLOURS.items())
        for scheme in ("light", "dark")
    )
    return f":root {{ {light} }}\n{dark % night}\n"


def themed(svg: str) -> str:
    """An SVG as part of a page that defines the `variables`: its colours follow the scheme, its type is the page's."""
    start = svg.index("<svg")
    inline = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    for name, each in COLOURS.items():
        inline = re.sub(rf"\b(fill|stroke): {each.light}", rf"\1: var(--dtem-{name})", inline)
    return inline.replace(FILE_FONT, FONT)


def standalone(svg: str) -> str:
    """An SVG file that follows the scheme of the reader's system."""
    inline = themed(svg)
    head = inline.index(">") + 1
    return f"{inline[:head]}<style>{variables()}</style>{inline[head:]}\n"
