"""Train an adapter for a model and, end-to-end, the model too.

By default the adapter alone learns and the model is frozen; with --preset adapter that takes a few thousand images
without labels and some minutes on a CPU. A run lives in --out; the same command again resumes it.
"""

import argparse
import dataclasses
import sys
from typing import Any

from dtem.cli.dataclass_flags import add_flags, given_flags
from dtem.cli.options import add_model_options, model_options
from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_report
from dtem.data.augmentation import Augmentation
from dtem.errors import DtemError, require
from dtem.tasks.captioning.generation_config import GenerationConfig
from dtem.tasks.segmentation.crop_config import CropConfig
from dtem.training.config import TrainConfig, presets, resolve

HELP = "train embeddings, or the whole model, on your images"
EXAMPLES = """\
examples:
  dtem train --preset few --model deit_tiny_patch16_224 --data photos --eval-data imagenet/val
  dtem train --preset deit_small --mode end-to-end --data imagenet/train --out runs/both
  dtem train --config my.yaml --lr 3e-4
  torchrun --nproc-per-node 8 -m -- dtem.cli train --preset deit_small --data imagenet/train
"""
COMMON = ["data", "eval_data", "out", "mode", "method", "loss", "r", "options", "epochs", "batch_size", "lr", "dtype"]
"""Settings that `--help` shows; `--help-all` shows all."""
TASK_SETTINGS = {
    "classification": Augmentation,
    "segmentation": CropConfig,
    "captioning": GenerationConfig,
    "answering": GenerationConfig,
}
"""Settings that one task alone has."""
MODEL_ARGUMENTS = ("name", "num_classes", "img_size", "global_pool", "pixel_norm")
"""Arguments of `create_model` that a settings file may hold under ``model``."""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb: the model, and every setting of a run."""
    add_model_options(parser, default=None)
    add = parser.group("settings").add_argument
    add("--preset", metavar="NAME", help=f"settings to start from: {', '.join(presets())}")
    add("--config", metavar="FILE", help="YAML file of settings; flags win over it, it wins over --preset")
    add("--restart", action="store_true", help="delete an earlier run in --out instead of resuming it")

    def group_of(name: str, parent: str) -> Any:
        return parser.group("settings") if name in COMMON else parser.group(parent or "run", advanced=True)

    add_flags(TrainConfig, group_of)


def run(args: argparse.Namespace) -> int:
    """Train, print the report."""
    require("accelerate", "train")
    flags = given_flags(args, TrainConfig)
    config, model_arguments = resolve(args.preset, args.config, flags)
    import torch

    import dtem
    from dtem.methods import METHODS
    from dtem.tasks import task_of

    METHODS[config.method]  # an unknown method is refused before weights are fetched
    arguments = _model_arguments(args, model_arguments)
    torch.manual_seed(config.seed)  # for --random-weights
    model = dtem.create_model(**arguments, drop_path_rate=0.0 if config.mode == "modular" else config.drop_path)
    _check_flags(task_of(model), flags)
    try:
        report = dtem.train(
            model,
            flags.pop("data", config.data),
            preset=args.preset,
            config=args.config,
            restart=args.restart,
            model_settings={name: value for name, value in arguments.items() if name in MODEL_ARGUMENTS},
            **flags,
        )
    except (KeyboardInterrupt, SystemExit) as stop:  # its notes say what is kept
        print(*getattr(stop, "__notes__", []), sep="\n", file=sys.stderr)
        raise
    if report.is_main_process:
        print_report(args, report)
    return 0


def _model_arguments(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `create_model`: those of preset and file, over which flags win."""
    if unknown := settings.keys() - set(MODEL_ARGUMENTS):
        raise DtemError(f"model: {min(unknown)} is not known in a settings file; use {', '.join(MODEL_ARGUMENTS)}")
    if args.img_size is None and settings.get("img_size") is not None:
        size = settings["img_size"]
        args.img_size = "x".join(map(str, size)) if isinstance(size, list) else str(size)
    flags = {name: value for name, value in model_options(args).items() if value is not None}
    arguments = {**settings, **({"name": args.model} if args.model else {}), **flags}
    if "name" not in arguments:
        raise DtemError("which model? Give --model, or a --preset that names one")
    return arguments


def _check_flags(task: str, flags: dict[str, Any]) -> None:
    """Refuse flags of another task: they would do nothing."""
    for owner, group in TASK_SETTINGS.items():
        own = TASK_SETTINGS.get(task) is group
        foreign = set() if own else flags.keys() & {field.name for field in dataclasses.fields(group)}
        if task == "segmentation":
            foreign -= {"flip"}
        if foreign:
            raise DtemError(
                f"--{min(foreign).replace('_', '-')} is for {owner}, and the model is for {task}: leave it out"
            )
