"""The `dtem` command: one thin file per verb. To add one: write its file, add its line here.

A verb's module has `NAME`, `HELP`, `add_arguments(parser)` and `run(args) -> int`, and imports nothing heavy until it
runs: `dtem --help` does not wait for torch. A verb that is not the same for every task has one such file for each, see
`dtem.cli.tasks`.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from dtem._version import __version__
from dtem.cli import tasks

VERBS = {
    "flops": "dtem.cli.flops",
    "bench": "dtem.cli.bench",
    "train": "dtem.cli.train",
    "eval": "dtem.cli.evaluate",
    "compare": "dtem.cli.compare",
    "average": "dtem.cli.average",
    "calibrate": "dtem.cli.calibrate",
    "reproduce": "dtem.cli.reproduce",
    "report": "dtem.cli.report",
    "caption": "dtem.cli.caption",
    "models": "dtem.cli.models",
    "export": "dtem.cli.export",
    "predict": "dtem.cli.predict",
    "show": "dtem.cli.show",
    "app": "dtem.cli.app",
    "demo": "dtem.cli.demo",
}

EXAMPLES = """\
examples:
  dtem models                                       what is supported, and the paper's models
  dtem flops deit_small_patch16_224 --r 0,8,16      what merging saves, counted
  dtem bench deit_small_patch16_224 --r 8,16        what merging saves, timed
  dtem demo                                         see it work, offline, in two minutes

`dtem VERB --help` explains each; with --json, stdout holds one JSON document and nothing else.
"""


def parser(task: str = tasks.DEFAULT) -> argparse.ArgumentParser:
    """The command line, with every verb as it is for `task`."""
    top = argparse.ArgumentParser(
        prog="dtem",
        description="Faster Vision Transformers by learned token merging.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"dtem {__version__}")
    verbs = top.add_subparsers(metavar="VERB", required=True, dest="verb")
    for name, path in VERBS.items():
        files = tasks.VERBS.get(name, {})
        verb = importlib.import_module(files.get(task, path))
        sub = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.__doc__,
            epilog=verb.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(sub)
        if files:
            text = f"{', '.join(files)}; each has options of its own (--task NAME --help); default %(default)s"
            sub.add_argument("--task", choices=tuple(files), default=tasks.DEFAULT, metavar="NAME", help=text)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        sub.set_defaults(run=verb.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (2: a mistake in what was asked for, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser(tasks.asked(argv)).parse_args(argv)
    args.command = ["dtem", *argv]
    args.stdout = sys.stdout  # for the result alone: whatever else is printed goes to stderr
    try:
        with contextlib.redirect_stdout(sys.stderr), _cleaning_up():
            code: int = args.run(args)
        args.stdout.flush()
        return code
    except ValueError as error:
        from dtem.types import DtemError  # only now: it brings torch along, which not every verb needs

        if not isinstance(error, DtemError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less, …) has what it wanted. Python flushes stdout once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), args.stdout.fileno())
        return 141


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
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
