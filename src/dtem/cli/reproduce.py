"""The paper's tables and figures, each as one command.

A study is a set of cells: one training at most, judged at some rates. Every cell is kept under --work, by what it is:
a cell that is there is not run again, also if another study made it; a training that was stopped goes on; several of
these commands may run side by side. At the end, and whenever asked again, the table is drawn from what is there.

--scale small runs a study on what is at hand: a model and the images in a folder with train and val (and extra, more to
learn from), or without --data a small ViT and digits that come along. --scale full is the paper's own setting, on
ImageNet-1k, COCO or ADE20K; `accelerate launch -m dtem.cli reproduce …` runs it on several GPUs.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtem.cli import common
from dtem.reproduce.specs import SCALES

if TYPE_CHECKING:
    from torch import nn

    from dtem.reproduce.bench import Bench
    from dtem.reproduce.cells import Cell
    from dtem.reproduce.specs import Study

NAME = "reproduce"
HELP = "a table or figure of the paper, at full or small scale"
EXAMPLES = """\
examples:
  dtem reproduce --list
  dtem reproduce temperature --updates 20                         the model and digits that come along
  dtem reproduce temperature --data imagenet --model deit_tiny_patch16_224 --weights deit.safetensors --plan
  dtem reproduce temperature --data imagenet --model deit_tiny_patch16_224 --only '*seed 0'
  accelerate launch --num_processes 8 -m dtem.cli reproduce modular --scale full --data imagenet
"""
MODEL = "deit_tiny_patch16_224"
DIGITS = "mnist_vit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="of a study")
    add("--list", action="store_true", help="all studies, with what each needs and costs")
    add("--plan", action="store_true", help="print the cells, which of them are done, and what is left; run nothing")
    add("--scale", choices=SCALES, default="small", help="default %(default)s")
    add("--data", metavar="SPEC", help="folder with train and val (class folders); captions.json; ade20k:DIR")
    add("--model", metavar="NAME", help=f"small scale: timm name, default {MODEL}; without --data {DIGITS}")
    add(
        "--weights",
        metavar="[MODEL=]FILE",
        action="append",
        default=[],
        help="host weights; default: timm's own (downloaded)",
    )
    add("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--norm", choices=("half", "imagenet"), help="segmentation: mean and deviation of pixels; default half")
    add("--seeds", metavar="LIST", help="with commas; default: the study's")
    add("--only", metavar="PATTERN", help="run cells whose name fits, such as 'dtem*' or '*seed 0'")
    add("--updates", metavar="N", type=int, help="of every training, instead of the study's")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of training; default: the study's")
    add("--workers", metavar="N", type=int, help="processes that decode images; default 0 at small scale")
    add("--threads", metavar="N", type=int, help="of torch; default: its own")
    add("--work", metavar="DIR", default="runs/reproduce", help="where cells are kept; default %(default)s")
    add("--out", metavar="DIR", help="keep the study's record here too, as NAME-SCALE.json, for dtem report")


def run(args: argparse.Namespace) -> int:
    """List, plan, or run and print."""
    if args.list:
        return _list(args)
    from dtem.types import DtemError

    if args.name is None:
        raise DtemError("which study? `dtem reproduce --list` has them all")
    from dtem.reproduce import cells, specs

    study = specs.find(args.name)
    found = cells.expand(study, args.scale, _seeds(args.seeds))
    asked = cells.only(found, args.only)
    bench = _bench(args, study)
    return _plan(args, bench, asked) if args.plan else _run(args, bench, found, asked)


def _list(args: argparse.Namespace) -> int:
    from dtem.reproduce import cells, specs

    rows, document = [], []
    for name in specs.names():
        study = specs.find(name)
        counts = {scale: sum(cell.trained for cell in cells.expand(study, scale)) for scale in SCALES}
        told = {scale: {"needs": study.at(scale).needs, "cost": study.at(scale).cost} for scale in SCALES}
        document.append({"name": name, "title": study.title, "trainings": counts, **told})
        full, small = study.full, study.small
        rows.append((name, study.title, str(counts["full"]), full.needs, full.cost, str(counts["small"]), small.cost))
    columns = ("study", "", "trainings, full", "needs", "costs", "trainings, small", "costs")
    note = "small: a model and a folder of photographs, one processor core; or the digits that come along"
    common.show(args, document, common.table("The paper's studies", columns, rows, note))
    return 0


def _seeds(text: str | None) -> list[int] | None:
    from dtem.types import DtemError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise DtemError(f"--seeds {text} must be whole numbers with commas between, such as 0,1,2") from error


def _bench(args: argparse.Namespace, study: "Study") -> "Bench":
    """The model and images that the options name."""
    import torch

    from dtem.reproduce import images
    from dtem.reproduce.bench import Bench
    from dtem.types import DtemError

    if args.threads is not None:
        if args.threads < 1:
            raise DtemError(f"--threads {args.threads} must be 1 or more")
        torch.set_num_threads(args.threads)
    work = Path(args.work)
    small = args.scale == "small"
    if args.data is None:
        if not small:
            raise DtemError(f"--scale full needs {study.full.needs or 'images'}: give them with --data")
        if study.task != "classification":
            raise DtemError(f"{study.name} is about {study.task}: give images with --data, and --model and --weights")
        if args.model not in (None, DIGITS):
            raise DtemError(f"--model {args.model} needs images: give a folder with train and val as --data")
        data, model = str(images.digits(work)), {"name": DIGITS}
    else:
        data, model = args.data, {}
        if small or args.model is not None:
            model = {"name": args.model or MODEL}
    for option in ("classes", "img_size", "norm"):
        if getattr(args, option) is not None:
            model[option] = getattr(args, option)
    changes = {name: value for name in ("updates", "dtype", "workers") if (value := getattr(args, name)) is not None}
    if small:
        changes.setdefault("workers", 0)
    weights = {}
    for given in args.weights:
        label, equals, file = given.partition("=")
        weights.update({label: file} if equals and not Path(given).exists() else {"": given})
    if args.updates is not None and args.updates < 1:
        raise DtemError(f"--updates {args.updates} must be 1 or more")
    return Bench(study, args.scale, work, _build, data, model, weights, changes)


def _build(described: dict[str, Any], drop_path: float) -> "nn.Module":
    """The host as the verbs build it."""
    from dtem.cli.tasks import builder

    if described["name"] == DIGITS:
        from dtem.tasks.classification import digits

        host: nn.Module = digits.host()
        return host
    names = ("weights", "classes", "img_size", "pool", "norm")
    given = {name: described.get(name) for name in names}
    options = argparse.Namespace(model=described["name"], encoder=None, random=False, **given)
    options.img_size = None if options.img_size is None else str(options.img_size)
    options.pretrained = options.weights is None
    return builder(described["task"])(options, drop_path_rate=drop_path)


def _plan(args: argparse.Namespace, bench: "Bench", found: "list[Cell]") -> int:
    from dtem.reproduce import running

    rows, document, left = [], [], set()
    for cell in found:
        done = running.done(bench, cell) is not None
        folder = bench.folder_of(cell).name
        if cell.trained and not done:
            left.add(folder)
        state = "done" if done else "to train" if cell.trained else "to evaluate"
        document.append({"cell": cell.name, "folder": folder, "trained": cell.trained, "state": state})
        rows.append((cell.name, cell.method, ", ".join(cell.rates.values()), state, folder))
    typical = running.typical_seconds(bench.work)
    cost = bench.study.at(args.scale).cost if typical is None else f"about {len(left) * typical / 60:.0f} minutes"
    note = f"left: {len(left)} trainings; {cost}"
    title = f"{bench.study.title}, {args.scale} scale"
    columns = ("cell", "method", "r", "", "folder")
    common.show(args, {"cells": document, "left": len(left)}, common.table(title, columns, rows, note))
    return 0


def _run(args: argparse.Namespace, bench: "Bench", found: "list[Cell]", asked: "list[Cell]") -> int:
    """Run the cells that are asked for; tables and records are of all that are done."""
    from dtem.files import write_file
    from dtem.measure import record
    from dtem.reproduce import plots, running, summary, tables
    from dtem.visualise import curves

    curves.check()
    if not running.run(bench, asked, args.command):
        return 0
    kept = summary.collect(bench, found, args.command)
    folder = bench.work / bench.study.name / args.scale
    path = record.save(kept, summary.path_of(folder, bench.study.name, args.scale))
    write_file(path.with_suffix(".svg"), plots.draw(bench.study, kept))
    if args.out is not None:
        record.save(kept, Path(args.out) / path.name)
    drawn = [
        common.table(table.title, table.columns, table.rows, table.caption)
        for table in tables.tables(bench.study, kept)
    ]
    notes = [f"record and plot: {folder}"]
    if bench.study.measure == "pictures":
        from dtem.reproduce import pictures

        notes.append(f"pictures: {pictures.draw(bench, found, folder / 'pictures')[0].parent}")
    common.show(args, kept.results, *drawn, *notes)
    return 0
