"""Open the explorer in a browser: drop an image, choose methods and r, and see side by side what is merged block by
block, what the model says, how many tokens are left, and what it costs.

It runs offline with the package's own digit reader; --model adds others. It listens on this machine alone (127.0.0.1),
takes files up to 10 MB and images up to 25 million pixels, keeps nothing, and fetches nothing from other servers.
"""

import argparse
import copy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtem.cli import common, show

if TYPE_CHECKING:
    from dtem.app.explorer import Model

NAME = "app"
HELP = "explore merging in a browser"
EXAMPLES = """\
examples:
  dtem app
  dtem app --model deit_tiny_patch16_224 --weights deit.safetensors
  dtem app --model deit_small_patch16_224 --adapter my.safetensors --record results/record.json --port 8000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="timm name of a model to offer, beside mnist_vit")
    add("--weights", metavar="FILE", help="its weights: .safetensors or a torch file; default: timm's own (downloaded)")
    add("--adapter", metavar="FILE_OR_NAME", help="its trained embeddings; default: shipped ones, if there are any")
    add("--record", metavar="FILE", help="record.json of `dtem eval --out`: its accuracies, for the curve")
    add("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on; default %(default)s: only here")
    add("--port", metavar="N", type=int, help="default: the first that is free from 7860 on")
    add("--browser", action="store_true", help="open the page at once")


def run(args: argparse.Namespace) -> int:
    """Build the models and serve."""
    from dtem.app import server
    from dtem.visualise import curves

    server.quiet()
    server.check()
    curves.check()
    models = offered(args)
    running = server.launch(models, args.host, args.port, browser=args.browser, wait=False)
    print(f"The explorer is at {running.local_url} (stop it with Ctrl-C).", file=sys.stderr)
    common.show(args, {"url": running.local_url, "models": [model.name for model in models]})
    args.stdout.flush()  # whoever started this waits for the address, not for the end
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"--host {args.host}: others on your network can use it too.", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that uploads are deleted then, too
    running.block_thread()
    return 0


def offered(args: argparse.Namespace) -> "list[Model]":
    """The user's model, if there is one, and the digit reader."""
    from dtem import storage
    from dtem.app import examples
    from dtem.app.explorer import Model, measured
    from dtem.tasks.classification import digits
    from dtem.types import DtemError

    if args.model in (None, digits.NAME):
        for option in ("weights", "adapter", "record", "classes", "img_size", "pool"):
            if getattr(args, option) is not None:
                raise DtemError(f"--{option.replace('_', '-')} is for a model of your own: add --model")
    record = None if args.record is None else Path(args.record)
    if record is not None:
        measured(record, args.model)  # so that a wrong file is known at once
    models = [Model(digits.NAME, digits.host(), examples.digits(), digits.adapter(), digits.record())]
    if args.model in (None, digits.NAME):
        return models
    adapter = show.embeddings(args.model) if args.adapter is None else storage.locate(args.adapter, None)
    host = show.host(copy.copy(args))
    if not getattr(host, "num_classes", 1):
        raise DtemError(f"{args.model} has no classifier, and the explorer shows what a model says; try `dtem show`")
    return [Model(args.model, host, examples.drawings(), adapter, record), *models]
