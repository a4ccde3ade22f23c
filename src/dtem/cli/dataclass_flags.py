"""Command-line flags of a settings dataclass: one per field, with the text under the field as its help."""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any


def add_flags(cls: type, group_of: Callable[[str, str], Any]) -> None:
    """A flag for every field of `cls` and of the dataclasses in it, in the parser group ``group_of(field, parent)``.

    Flags that the user does not give are not in `given_flags`.
    """
    for field, parent, text in _fields(cls):
        _add(group_of(field.name, parent), field, text)


def given_flags(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The flags that the user gave, by field name."""
    values = {field.name: getattr(args, field.name, None) for field, _, _ in _fields(cls)}
    return {name: dict(value) if name == "options" else value for name, value in values.items() if value is not None}


def _fields(cls: type, parent: str = "") -> Iterator[tuple[dataclasses.Field[Any], str, str]]:
    """The fields, those of nested dataclasses too, with the field that holds them and their help text."""
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from _fields(field.type, field.name)
        else:
            yield field, parent, texts.get(field.name, "")


def _add(group: Any, field: dataclasses.Field[Any], text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    default = None if field.default is dataclasses.MISSING else field.default
    shown = "" if default in (None, "", ()) else f"; default {default}"
    if text.partition(" ")[0][1:].islower():  # as the help of other flags begins; not "MixUp"
        text = text[0].lower() + text[1:]
    options: dict[str, Any] = {"help": (text.rstrip(".") + shown).replace("%", "%%"), "dest": field.name}
    kind, origin = field.type, typing.get_origin(field.type)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif origin is typing.Literal:
        options["choices"] = typing.get_args(kind)
    elif origin is tuple:
        options |= {"action": "append", "choices": typing.get_args(typing.get_args(kind)[0])}
    elif origin is types.UnionType:  # tuple[float, float] | None
        options |= {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    elif origin is dict:
        options |= {"action": "append", "type": _name_and_value, "metavar": "NAME=VALUE"}
        flag = flag.removesuffix("s")
    else:
        options |= {"type": kind, "metavar": {int: "N", float: "X"}.get(typing.cast(Any, kind), "TEXT")}
    group.add_argument(flag, default=None, **options)


def _name_and_value(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python reads it, or else as text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """The docstring under each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    texts = {}
    for field, after in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts
