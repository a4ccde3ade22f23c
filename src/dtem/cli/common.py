"""What the verbs share: options that choose a model, building it, and printing."""

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtem.cli import hub_models

if TYPE_CHECKING:
    from torch import nn

    from dtem.handle import Handle
    from dtem.measure.flops import Count

CONVENTIONS = {
    "macs": "multiply-adds of matrix products and convolutions, as timm prints them",
    "paper": "macs plus the work of biases, LayerNorm, softmax, GELU and sums, as in the paper's tables",
}


def add_model_arguments(parser: argparse.ArgumentParser, fixed: bool = False) -> None:
    """Options that every verb on a model takes; `fixed`: a timm model at one r."""
    others = "" if fixed else ", or hf:NAME or a folder"
    parser.add_argument("model", metavar="MODEL", help=f"timm name, e.g. deit_small_patch16_224{others}")
    parser.add_argument(
        "--method", metavar="NAME", help="default dtem (untrained it merges as tome does); docs/methods.md has them all"
    )
    parser.add_argument("--adapter", metavar="FILE_OR_NAME", help="trained embeddings: a file, hub id or shipped name")
    parser.add_argument("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    parser.add_argument("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    parser.add_argument("--shortcut", action="store_true", help="last block: compute the class token only (exact)")
    parser.add_argument(
        "--r",
        metavar="R" if fixed else "LIST",
        default="13" if fixed else "0,8,16",
        help=f"tokens merged per block{'' if fixed else ', several with commas'}: 16, 16@-0.5 (falling), 16/16/8/0 "
        "(one per block), 20%% (of those left), 2.5G (what meets 2.5 GMACs); default %(default)s",
    )


def add_weight_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say where the host's weights come from; by default they are random."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weights", metavar="FILE", help="host weights: a .safetensors or torch file (tensors only)")
    source.add_argument("--pretrained", action="store_true", help="timm's own weights (downloaded once)")
    parser.add_argument("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")


def schedules(text: str) -> list[str]:
    """The schedules of `--r`, checked, each once."""
    from dtem import schedule

    specs = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for spec in specs:
        schedule.parse(spec)
    return specs


def methods(text: str, dense: bool = False) -> list[str]:
    """The methods of `--method`, checked, each once."""
    from dtem.methods import find

    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        find(name, dense)
    return names


def check_method(args: argparse.Namespace, dense: bool = False) -> None:
    """For those who build a model: an unknown method is refused before weights are fetched."""
    if getattr(args, "method", None) is not None:
        methods(args.method, dense)


def build(args: argparse.Namespace, **options: Any) -> "nn.Module":
    """The host model that the options describe, in eval mode. Created on whatever `torch.device` context is active."""
    check_method(args)
    if hub_models.named(args.model) and (getattr(args, "data", None) or getattr(args, "weights", None)):
        raise _only_counted(args.model)
    options["pretrained"] = getattr(args, "pretrained", False)
    if args.img_size is not None:
        options["img_size"] = image_size(args.img_size)
    if args.pool is not None:
        options["global_pool"] = args.pool
    if getattr(args, "classes", None) is not None:
        options["num_classes"] = args.classes
    model = create(args.model, **options)
    if getattr(args, "weights", None) is not None:
        from dtem.cli.weights import load_weights

        load_weights(model, args.weights)
    return model


def _only_counted(name: str) -> Exception:
    from dtem.types import DtemError

    return DtemError(
        f"{name}: models of transformers are counted and timed here; to train or evaluate one, patch it in "
        "Python (dtem.patch) and use your own images as its processor makes them"
    )


def create(name: str, **options: Any) -> "nn.Module":
    """timm's model of that name, or ours, or one of transformers; an unknown one is refused with the nearest names."""
    if hub_models.named(name):
        return hub_models.create(name, **options)
    import timm

    import dtem.hosts  # noqa: F401 - adds ours to timm's
    from dtem.types import DtemError

    known = timm.list_models()
    bare = name.partition(".")[0]
    if bare not in known:
        begun = [model for model in known if bare and model.startswith(bare)]
        near = begun[:3] or difflib.get_close_matches(bare, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`dtem models` says what is supported"
        raise DtemError(f"timm has no model {name!r}; {hint}")
    try:
        model: nn.Module = timm.create_model(name, **options).eval()
    except Exception as error:  # timm, its models and the hub raise errors of every kind here
        asked = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise DtemError(f"timm cannot build {name!r} with {asked}: {_first_line(error)}") from error
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    size = options.get("img_size")
    if size is not None and patch_size is not None and (size[0] % patch_size[0] or size[1] % patch_size[1]):
        raise DtemError(f"--img-size {size[0]}x{size[1]} is not a multiple of the patch size, {patch_size[0]}")
    return model


def image_size(text: str, option: str = "--img-size") -> tuple[int, int]:
    """``384`` or ``224x320`` (height, width)."""
    from dtem.types import DtemError

    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise DtemError(f"{option} {text} is not a size; write 384, or height x width as 224x320")
    return int(parts[0]), int(parts[-1])


def patch(args: argparse.Namespace, model: "nn.Module") -> "Handle":
    """Patch `model` as the options say, with r = 0 for now."""
    import dtem
    from dtem.types import DtemError

    if args.adapter is None:
        return dtem.patch(model, method=args.method or "dtem", shortcut=args.shortcut)
    if args.method is not None:
        raise DtemError(f"--adapter {args.adapter} brings its own method; leave --method {args.method} out")
    return dtem.from_pretrained(args.adapter, model, r=0, shortcut=args.shortcut)


def count(handle: "Handle") -> "Count":
    """Operations per image at the handle's present r."""
    from dtem.measure import flops

    return flops.count(handle.model, handle.host.image)


def short_plan(plan: Sequence[int]) -> str:
    """One r per block with repeats folded: ``16 ×11, 7``."""
    runs: list[list[int]] = []
    for r in plan:
        if runs and runs[-1][0] == r:
            runs[-1][1] += 1
        else:
            runs.append([r, 1])
    return ", ".join(f"{r} ×{times}" if times > 1 else str(r) for r, times in runs)


def giga(operations: int) -> str:
    """Operations in billions, three digits or more."""
    return f"{operations / 1e9:.2f}" if operations >= 1e9 else f"{operations / 1e9:.3g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None) -> Any:
    """A rich table, numbers to the right."""
    from rich import box
    from rich.table import Table

    drawn = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def show(args: argparse.Namespace, document: Any, *parts: Any) -> None:
    """Print the result: the document with --json, else the rich parts."""
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), file=args.stdout)
        return
    from rich.console import Console

    # Into a file or pipe, tables keep their width instead of being squeezed into 80 columns.
    console = Console(file=args.stdout, width=None if args.stdout.isatty() else 160, markup=False, highlight=False)
    for part in parts:
        console.print(part)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
