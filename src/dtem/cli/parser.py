"""The command-line parser: common options in `--help`, all of them in `--help-all`."""

import argparse
import functools
import sys
from typing import Any

from dtem.errors import DtemError


class HelpAll(argparse._HelpAction):
    """`--help-all`: like `--help`, with the advanced options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, VerbParser)
        sys.stdout.write(parser.format_help(advanced=True))
        parser.exit()


class VerbParser(argparse.ArgumentParser):
    """Parser of one verb. Options are in named groups; advanced groups are shown by `--help-all` only."""

    def __init__(self, **options: Any) -> None:
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=120, max_help_position=32)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)
        self._advanced: list[Any] = []
        self.add_argument("--help-all", action=HelpAll, help="show all options, the advanced ones too")

    def group(self, title: str, advanced: bool = False) -> Any:
        """The option group of that title, made on first use."""
        for group in self._action_groups:
            if group.title == title:
                return group
        group = self.add_argument_group(title)
        if advanced:
            self._advanced.append(group)
        return group

    def format_usage(self) -> str:
        return f"usage: {self._short_usage()}\n"

    def _short_usage(self) -> str:
        """The verb with its required arguments; argparse would list every option."""
        parts = [self.prog, "[options]"]
        for action in self._actions:
            metavar = action.metavar or action.dest.upper()
            if not action.option_strings:
                parts.append(f"[{metavar}]" if action.nargs in ("?", "*") else str(metavar))
            elif action.required:
                parts.append(f"{action.option_strings[0]} {metavar}")
        return " ".join(parts)

    def format_help(self, advanced: bool = False) -> str:
        """The help text; without `advanced` only the common options, and the number of others."""
        hidden = [] if advanced else self._advanced
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage(), [], [], "usage: ")
        formatter.add_text(self.description)
        for group in self._action_groups:
            if group in hidden:
                continue
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        count = sum(len(group._group_actions) for group in hidden)
        if count:
            names = ", ".join(str(group.title) for group in hidden)
            formatter.add_text(f"{count} more options ({names}): {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> Any:
        """A mistake on the command line, in one line with the way out."""
        self.exit(2, f"error: {message}\n{self.prog} --help shows the options\n")


def comma_list(text: str) -> list[str]:
    """``a,b,c``, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def batch_sizes(option: str, text: str) -> list[int]:
    """``1,32`` as numbers, each once, none below 1."""
    try:
        values = [int(part) for part in comma_list(text)]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise DtemError(f"{option} {text} must be numbers from 1 on, separated by commas, such as 1,32")
    return list(dict.fromkeys(values))


def image_size(option: str, text: str | None) -> tuple[int, int] | None:
    """``384`` or ``224x320`` as (height, width)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"{option} {text} is not a size; write 384, or height x width as 224x320")
    return int(parts[0]), int(parts[-1])
