"""Errors of dtem. Nothing heavy is imported here, so any module can raise them without loading torch."""

import importlib
from typing import Any


class DtemError(ValueError):
    """A mistake that the user can correct. The message names the offending value and the fix."""


def require(module: str, extra: str) -> Any:
    """Import an optional package; where it is missing, name the extra of dtem that installs all that is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DtemError(f"this needs the package {module.partition('.')[0]} ({error}): {install(extra)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def install(extra: str) -> str:
    """The command that installs an extra of dtem."""
    return f'in a checkout of dtem, run pip install ".[{extra}]"'
