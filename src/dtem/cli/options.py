"""Command-line flags out of a settings dataclass: one per field, its help from the text under the field."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from typing import Any

Flags = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser, cls: type, title: str) -> None:
    """A flag for every field of `cls` and of the dataclasses inside it. What is not given stays out of `given`."""
    texts, group = _texts(cls), parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory):
            add_flags(parser, field.default_factory, f"{field.name} settings")
            continue
        _add(group, field, texts.get(field.name, ""))


def given(args: argparse.Namespace, cls: type) -> Flags:
    """The flags that the user wrote, by field name."""
    found: Flags = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory):
            found |= given(args, field.default_factory)
        elif (value := getattr(args, field.name, None)) is not None:
            found[field.name] = dict(value) if field.type in (dict, dict[str, Any]) else value
    return found


def _add(parser: argparse._ArgumentGroup, field: dataclasses.Field[Any], text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    default = field.default if field.default is not dataclasses.MISSING else None
    shown = "" if default in (None, "", ()) else f"; default {default}"
    options: dict[str, Any] = {
        "help": (text.rstrip(".") + shown).replace("%", "%%"),
        "dest": field.name,
        "default": None,
    }
    kind = field.type
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif kind == tuple[str, ...]:
        options |= {"action": "append", "metavar": "NAME"}
    elif kind == (tuple[float, float] | None):
        options |= {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    elif kind == dict[str, Any]:
        options |= {"action": "append", "type": _pair, "metavar": "NAME=VALUE"}
        flag = flag.removesuffix("s")
    else:
        options |= {"type": kind, "metavar": "N" if kind is int else "X" if kind is float else "TEXT"}
    parser.add_argument(flag, **options)


def _pair(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python would read it, or else as text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@functools.cache
def _texts(cls: type) -> dict[str, str]:
    """The string that stands under each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts
