"""Write docs/api.md from `dtem.__all__`.

python docs/make_api.py            rewrite it
python docs/make_api.py --check    exit 1 if it is not in step with the package
"""

import inspect
import sys
import typing
from pathlib import Path
from typing import Any

import dtem
from dtem.visualise.segmentation import SegmentationVisualisation

PAGE = Path(__file__).parent / "api.md"
AUTHORS = [
    "dtem.methods.base.Method",
    "dtem.types.Tokens",
    "dtem.types.Taps",
    "dtem.types.HostSpec",
    "dtem.integrations.base.Integration",
]
HEAD = """\
# API

The public names of `import dtem`. Everything else is internal and may change.

<!-- Written by docs/make_api.py: do not edit. -->
"""
SCHEDULES = """\
## Schedules

Every argument `r` takes any of these.

::: dtem.schedule
    options:
      show_root_heading: false
      show_root_toc_entry: false
      members: false
"""


def page() -> str:
    """The page: public names by the room that they live in, what they return, and the classes to build on."""
    rooms: dict[str, list[str]] = {}
    results: list[str] = []
    for name in dtem.__all__:
        value = getattr(dtem, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):  # __version__
            continue
        path = _path(value)
        rooms.setdefault(path.split(".")[1], []).append(path)
        results += _returned(value)
    # The order of rooms is that of a reader: merging first, then what else there is.
    order = ["handle", "adapters", "models", "methods", "integrations"]
    parts = [HEAD]
    for room in sorted(rooms, key=lambda room: (order.index(room) if room in order else len(order), room)):
        parts += [f"## {room.capitalize()}\n", *(f"::: {path}\n" for path in rooms[room])]
    listed = {path for paths in rooms.values() for path in paths}
    parts += ["## Results\n", *(f"::: {path}\n" for path in dict.fromkeys(results) if path not in listed)]
    parts += [SCHEDULES, "## For authors of methods and integrations\n", *(f"::: {path}\n" for path in AUTHORS)]
    return "\n".join(parts)


def _path(value: Any) -> str:
    """Where it is defined: mkdocstrings reads the source and cannot follow the lazy imports of `dtem`."""
    return f"{value.__module__}.{value.__qualname__}"


def _returned(value: Any) -> list[str]:
    """The classes of dtem that a function returns."""
    if inspect.isclass(value):
        return []
    names = {"SegmentationVisualisation": SegmentationVisualisation}
    returned = typing.get_type_hints(value, localns=names).get("return")
    kinds = typing.get_args(returned) or (returned,)
    return [_path(kind) for kind in kinds if inspect.isclass(kind) and kind.__module__.startswith("dtem.")]


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print("docs/api.md is not in step with dtem.__all__: run python docs/make_api.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
