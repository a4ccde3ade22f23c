"""Open the explorer in a browser: drop an image, choose methods and r, and see side by side what is merged block by
block, what the model predicts, how many tokens remain, and what it costs.

It works offline with a digit classifier that comes with dtem; --model adds another model. It listens on this machine
alone (127.0.0.1), takes files up to 10 MB and images up to 25 million pixels, keeps nothing when it ends, and fetches
nothing from other servers.
"""

import contextlib
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts
from dtem.errors import DtemError

if TYPE_CHECKING:
    from dtem.app.explorer import Model

HELP = "explore merging in a browser"
EXAMPLES = """\
examples:
  dtem app
  dtem app --model deit_tiny_patch16_224 --weights deit.safetensors
  dtem app --model deit_small_patch16_224 --adapter my.safetensors --record results/record.json --port 8000
"""
DIGITS = "digits_vit"


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    options.add_model_options(parser, default=None)
    add = parser.group("merging").add_argument
    add("--adapter", metavar="FILE", help="adapter of --model for dtem; default: the shipped one, if there is one")
    add("--record", metavar="FILE", help="record.json of `dtem eval --out`: accuracies for the trade-off curve")
    add = parser.group("server").add_argument
    add(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on; default %(default)s, this machine only",
    )
    add(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="with --host: a name by which others address this machine; repeatable",
    )
    add("--port", metavar="N", type=int, help="default: the first free one from 7860 on")
    add("--browser", action="store_true", help="open the page in the browser")


def run(args: Namespace) -> int:
    """Load the models and serve the page."""
    print(f"loading the explorer with {args.model or DIGITS} …", file=sys.stderr, flush=True)
    from dtem.app import server

    server.no_telemetry()
    server.check()
    with _exit_on_signals():
        models = _models(args)
        with server.serve(models, args.host, args.port, browser=args.browser, allowed_hosts=args.allowed_host) as url:
            print(f"The explorer is at {url} (stop it with Ctrl-C).", file=sys.stderr)
            print_parts(args, {"url": url, "models": [model.name for model in models]})
            args.stdout.flush()  # whoever started this waits for the address, not for the end
            if args.host not in ("127.0.0.1", "localhost", "::1"):
                print(
                    f"--host {args.host}: others on your network can use it too, by address or --allowed-host NAME.",
                    file=sys.stderr,
                )
            server.wait()
    return 0


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """End by SystemExit on any signal to stop, so that uploads are deleted."""
    signals = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]

    def stop(*_: Any) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # one is enough: nothing interrupts the cleaning up
        sys.exit(0)

    before = [(number, signal.signal(number, stop)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _models(args: Namespace) -> "list[Model]":
    """The user's model, if there is one, and the digit classifier."""
    from dtem.adapters.locate import locate, shipped_for
    from dtem.app import examples
    from dtem.app.explorer import Model, digit_model, load_accuracies
    from dtem.data.labels import num_classes
    from dtem.models.factory import create_model

    settings = options.model_options(args)
    if args.model in (None, DIGITS):
        del settings["pretrained"]
        for option, value in {**settings, "adapter": args.adapter, "record": args.record}.items():
            if value is not None:
                raise DtemError(f"--{option.replace('_', '-')} is for a model of your own: add --model")
        return [digit_model()]
    record = None if args.record is None else Path(args.record)
    if record is not None:
        load_accuracies(record, args.model)  # a wrong file is refused before weights are downloaded
    adapter = shipped_for(args.model) if args.adapter is None else locate(args.adapter)
    host = create_model(args.model, **settings)
    if num_classes(host) == 0:
        raise DtemError(f"{args.model} has no classifier, and the explorer shows predictions; try `dtem show`")
    return [Model(args.model, host, examples.drawings(), adapter, record), digit_model()]
