"""The `dtem` command: one thin file per verb. To add one: write its file, add its line here.

A verb's module has `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(args) -> int`. It parses, calls one public
function of dtem and prints what that returns. It imports nothing heavy until it runs: `dtem --help` does not wait for
torch.
"""

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from dtem._version import __version__
from dtem.cli.parser import VerbParser
from dtem.errors import DtemError

VERBS = {
    "flops": "dtem.cli.flops",
    "bench": "dtem.cli.bench",
    "train": "dtem.cli.train",
    "eval": "dtem.cli.eval",
    "compare": "dtem.cli.compare",
    "tune": "dtem.cli.tune",
    "predict": "dtem.cli.predict",
    "export": "dtem.cli.export",
    "show": "dtem.cli.show",
    "caption": "dtem.cli.caption",
    "ask": "dtem.cli.ask",
    "models": "dtem.cli.models",
    "adapters": "dtem.cli.adapters",
    "average": "dtem.cli.average",
    "app": "dtem.cli.app",
    "demo": "dtem.cli.demo",
}

_ARGUMENT = re.compile(
    r"(?<![\w./-])(?P<name>[a-z]\w*) ?= ?(?:'(?P<quoted>[^']*)'|(?P<plain>[^\s,;:)'\[({]*[^\s,;:)'\[({.]))"
    r"|(?<![\w./-])(?P<alone>[a-z]+(?:_[a-z]+)+)(?![\w./(=-])"
)
"""In a message: ``name = value``, or a name with underscores alone."""

EXAMPLES = """\
examples:
  dtem models                                                what is supported, and the paper's models
  dtem flops --model deit_small_patch16_224 --r 0,8,16       what merging saves, counted
  dtem bench --model deit_small_patch16_224 --r 8,16         what merging saves, timed
  dtem demo                                                  see it work, offline, in two minutes

`dtem VERB --help` explains each; with --json, stdout holds one JSON document and nothing else.
"""


def parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """The command line with these verbs. Modules of other verbs are not imported."""
    top = argparse.ArgumentParser(
        prog="dtem",
        description="Faster Vision Transformers by learned token merging.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"dtem {__version__}")
    subparsers = top.add_subparsers(metavar="VERB", required=True, dest="verb", parser_class=VerbParser)
    for name in verbs:
        verb = importlib.import_module(VERBS[name])
        sub = subparsers.add_parser(name, help=verb.HELP, description=verb.__doc__, epilog=verb.EXAMPLES)
        verb.add_arguments(sub)
        sub.group("options").add_argument(
            "--json", action="store_true", help="print one JSON document instead of tables"
        )
        sub.set_defaults(run=verb.run, flags=frozenset(sub._option_string_actions))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (2: a mistake of the user, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser(argv[:1] if argv and argv[0] in VERBS else VERBS).parse_args(argv)
    args.command = ["dtem", *argv]
    args.stdout = sys.stdout  # for the result alone: whatever else is printed goes to stderr
    try:
        with contextlib.redirect_stdout(sys.stderr), _ended_by_sigterm():
            code: int = args.run(args)
        args.stdout.flush()
        return code
    except DtemError as error:
        print(f"error: {as_flags(str(error), args.flags)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less, …) has closed the pipe. Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), args.stdout.fileno())
        return 141


def as_flags(message: str, flags: Collection[str]) -> str:
    """The message of a Python function with its arguments as the flags of this command line.

    ``global_pool = 'avg'`` becomes ``--global-pool avg``, where the verb has that flag.
    """

    def flag(match: "re.Match[str]") -> str:
        name = f"--{(match['name'] or match['alone']).replace('_', '-')}"
        value = match["plain"] if match["quoted"] is None else match["quoted"] or "''"
        if (name, value) == ("--pretrained", "False"):
            name, value = "--random-weights", None
        if name not in flags:
            return match[0]
        return name if value in (None, "True") else f"{name} {value}"

    return _ARGUMENT.sub(flag, message)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A command that is told to end (SIGTERM) ends as one that is interrupted: what it was writing does not stay."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread, which alone can do that
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
