"""Run a study of the paper: train and evaluate its cells, then print its tables.

A cell is one training run at most, evaluated at some rates. Cells are stored under --work by their settings: a finished
cell is not run again, also if another study made it; a stopped training resumes; several of these commands may run side
by side. The tables show all finished cells.

--scale small runs a study on a model and a folder of your own with train and val (and extra, more training images), or
without --data on a small ViT and packaged digits. --scale full is the paper's setting, on ImageNet-1k, COCO or ADE20K;
`accelerate launch -m benchmarks.reproduce …` runs it on several GPUs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reproduce import cells, register_ablations, search, specs
from benchmarks.reproduce.specs import SCALES, Study
from dtem.errors import DtemError
from dtem.tables import Table, render

if TYPE_CHECKING:
    from benchmarks.reproduce.study_setup import StudySetup
    from dtem.measure.record import Record

EXAMPLES = """\
examples:
  python -m benchmarks.reproduce --list
  python -m benchmarks.reproduce temperature --updates 20            a small ViT on digits
  python -m benchmarks.reproduce temperature --data imagenet --model deit_tiny_patch16_224 --plan
  python -m benchmarks.reproduce temperature --data imagenet --model deit_tiny_patch16_224 --only '*seed 0'
  accelerate launch --num_processes 8 -m benchmarks.reproduce modular --scale full --data imagenet
"""
DEFAULT_MODEL = "deit_tiny_patch16_224"
DIGITS_MODEL = "digits_vit"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="name of the study")
    add("--list", action="store_true", help="list all studies with their requirements and costs")
    add(
        "--search",
        action="store_true",
        help="search the learning rate of the rows (seed 0) on held-out training images",
    )
    add("--plan", action="store_true", help="print the cells and which are finished; run nothing")
    add("--scale", choices=SCALES, default="small", help="default %(default)s")
    add("--data", metavar="SPEC", help="folder with train and val (class folders); captions.json; ade20k:DIR")
    add("--model", metavar="NAME", help=f"small scale; default {DEFAULT_MODEL}, without --data {DIGITS_MODEL}")
    add(
        "--weights",
        metavar="[MODEL=]FILE",
        action="append",
        default=[],
        help="weights of the model; default: published ones (downloaded)",
    )
    add("--num-classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    add("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    add("--pixel-norm", choices=("half", "imagenet"), help="segmentation: mean and deviation of pixels; default half")
    add("--seeds", metavar="LIST", help="with commas; default: the study's")
    add("--only", metavar="PATTERN", help="run cells whose name matches, such as 'dtem*' or '*seed 0'")
    add("--updates", metavar="N", type=int, help="optimiser updates of every training; default: the study's")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of training; default: the study's")
    add("--workers", metavar="N", type=int, help="processes that decode images; default 0 at small scale")
    add("--threads", metavar="N", type=int, help="torch threads")
    add("--work", metavar="DIR", type=Path, default=Path("runs/reproduce"), help="folder of cells; default %(default)s")
    add("--out", metavar="DIR", type=Path, help="write the record here too, as NAME-SCALE.json, for benchmarks.report")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        _print(args.json, *list_studies())
        return 0
    from benchmarks import common

    return common.run(lambda: _run(args, ["python", "-m", "benchmarks.reproduce", *(argv or sys.argv[1:])]))


def _run(args: argparse.Namespace, command: list[str]) -> int:
    if args.name is None:
        raise DtemError("name a study; --list shows them all")
    if args.threads is not None:
        if args.threads < 1:
            raise DtemError(f"--threads {args.threads} must be 1 or more")
        import torch

        torch.set_num_threads(args.threads)
    register_ablations()
    study = specs.find(args.name)
    if study.at(args.scale).measure == "speed" and (args.plan or args.search):
        raise DtemError(f"{study.name} at {args.scale} scale has no cells to train: leave --plan and --search out")
    every = cells.expand(study, args.scale, parse_seeds(args.seeds))
    chosen = cells.matching(every, args.only)
    setup = make_setup(
        study,
        args.scale,
        args.work,
        data=args.data,
        model=args.model,
        weights=args.weights,
        model_options={name: getattr(args, name) for name in ("num_classes", "img_size", "pixel_norm")},
        overrides={name: getattr(args, name) for name in ("updates", "dtype", "workers")},
    )
    if args.plan:
        _print(args.json, *plan(setup, chosen))
        return 0
    if args.search:
        _print(args.json, *search.search(setup, chosen))
        return 0
    if setup.measure == "speed":
        from benchmarks.reproduce import speed

        _print(args.json, *write_record(setup, speed.collect(setup, every, command), args.out))
        return 0
    from benchmarks.reproduce import runner

    if runner.run(setup, chosen, command):
        _print(args.json, *summarise(setup, every, command, args.out))
    return 0


def list_studies() -> tuple[list[dict[str, Any]], Table]:
    """All studies with requirements and costs, as JSON and as a table."""
    rows, document = [], []
    for name in specs.names():
        study = specs.find(name)
        trainings = {
            scale: sum(cell.trained for cell in cells.expand(study, scale)) * (study.at(scale).measure != "speed")
            for scale in SCALES
        }
        scales = {scale: {"needs": study.at(scale).needs, "cost": study.at(scale).cost} for scale in SCALES}
        document.append({"name": name, "title": study.title, "trainings": trainings, **scales})
        full, small = study.full, study.small
        counts = [str(trainings[scale]) for scale in ("full", "small")]
        rows.append((name, study.title, counts[0], full.needs, full.cost, counts[1], small.cost))
    columns = ("study", "", "trainings, full", "needs", "costs", "trainings, small", "costs")
    caption = "small: any model and folder of images, or a small ViT and packaged digits; costs are of one CPU core"
    return document, Table("Studies of the paper", columns, rows, caption)


def parse_seeds(text: str | None) -> list[int] | None:
    """``0,1,2``."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise DtemError(f"--seeds {text} must be whole numbers with commas between, such as 0,1,2") from error


def make_setup(
    study: Study,
    scale: str,
    work: Path,
    *,
    data: str | None = None,
    model: str | None = None,
    weights: Sequence[str] = (),
    model_options: dict[str, Any],
    overrides: dict[str, Any],
) -> "StudySetup":
    """The setup that the command line describes; options that are None are left to the model and the study."""
    from benchmarks.reproduce import image_splits
    from benchmarks.reproduce.study_setup import StudySetup
    from dtem.cli.parser import image_size

    small = scale == "small"
    if study.at(scale).measure == "speed":
        data = data or ""
    elif data is None:
        if not small:
            raise DtemError(f"--scale full needs {study.full.needs or 'images'}: give them with --data")
        if study.task != "classification":
            raise DtemError(f"{study.name} is about {study.task}: give images with --data, and --model and --weights")
        if model not in (None, DIGITS_MODEL):
            raise DtemError(f"--model {model} needs images: give a folder with train and val as --data")
        data, model = str(image_splits.digits(work)), DIGITS_MODEL
    elif small:
        model = model or DEFAULT_MODEL
    options = {name: value for name, value in model_options.items() if value is not None}
    if "img_size" in options:
        options["img_size"] = image_size("--img-size", options["img_size"])
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if overrides.get("updates", 1) < 1:
        raise DtemError(f"--updates {overrides['updates']} must be 1 or more")
    if small:
        overrides.setdefault("workers", 0)
    if model == DIGITS_MODEL:
        overrides["drop_path"] = 0.0  # it has no stochastic depth
    files = {}
    for text in weights:
        label, equals, file = text.partition("=")
        files.update({label: file} if equals and not Path(text).exists() else {"": text})
    named = {} if model is None else {"name": model}
    return StudySetup(study, scale, work, data, {**named, **options}, files, overrides)


def plan(setup: "StudySetup", chosen: Sequence[cells.Cell]) -> tuple[dict[str, Any], Table]:
    """Cells with their state, as JSON and as a table."""
    from benchmarks.reproduce import runner

    rows, document, unfinished = [], [], set()
    for cell in chosen:
        finished = runner.load_results(setup, cell) is not None
        searched = not search.is_missing(setup, cell)
        folder = setup.folder(cell).name if searched else ""
        if cell.trained and not finished:
            unfinished.add(folder or cell.name)
        state = "finished" if finished else "to train" if cell.trained else "to evaluate"
        state = state if searched else "to search"
        document.append({"cell": cell.name, "folder": folder, "trained": cell.trained, "state": state})
        rows.append((cell.name, cell.method, ", ".join(cell.rates.values()), state, folder))
    seconds = runner.median_seconds(setup.work)
    cost = setup.study.at(setup.scale).cost
    if seconds is not None:
        cost = f"about {len(unfinished) * seconds / 60:.0f} minutes"
    columns = ("cell", "method", "r", "state", "folder")
    title, caption = f"{setup.study.title}, {setup.scale} scale", f"{len(unfinished)} trainings left; {cost}"
    return {"cells": document, "left": len(unfinished)}, Table(title, columns, rows, caption)


def summarise(
    setup: "StudySetup", every: Sequence[cells.Cell], command: Sequence[str], out: Path | None = None
) -> tuple[Any, ...]:
    """Write record and plot of all finished cells; returns the results as JSON, then tables and notes."""
    from benchmarks.reproduce import foreground, study_record

    parts = write_record(setup, study_record.collect(setup, every, command), out)
    if setup.measure == "pictures":
        paths = foreground.draw_pictures(setup, every, setup.work / setup.study.name / setup.scale / "pictures")
        parts = *parts, f"pictures: {paths[0].parent}"
    return parts


def write_record(setup: "StudySetup", collected: "Record", out: Path | None = None) -> tuple[Any, ...]:
    """Write a study's record and its plot; returns the results as JSON, then tables and notes."""
    from benchmarks.reproduce import study_plots, study_record
    from benchmarks.reproduce.study_tables import study_tables
    from dtem.files import write_file
    from dtem.measure import record

    folder = setup.work / setup.study.name / setup.scale
    path = record.save(collected, study_record.record_path(folder, setup.study.name, setup.scale))
    write_file(path.with_suffix(".svg"), study_plots.draw(setup.study, collected))
    if out is not None:
        record.save(collected, out / path.name)
    return collected.results, *study_tables(setup.study, collected), f"record and plot: {folder}"


def _print(as_json: bool, document: object, *parts: Table | str) -> None:
    if as_json:
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        render(*parts, file=sys.stdout, width=None if sys.stdout.isatty() else 160)


if __name__ == "__main__":
    sys.exit(main())
