"""Train the merging policy of a model (and, end-to-end, the model too).

By default only the embeddings learn, which a few thousand images and some minutes on a CPU allow; with --loss distill
the images need no labels. A run lives in --out; the same command again goes on where it was stopped.
"""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from dtem.cli import common, segmentation
from dtem.cli.options import add_flags, given
from dtem.cli.tasks import builder
from dtem.tasks.captioning.style import Style
from dtem.tasks.classification.augmentation import Augmentation
from dtem.tasks.segmentation.augmentation import Views
from dtem.training.config import TrainConfig, flat, presets, resolve

if TYPE_CHECKING:
    from dtem.training.loop import Result

NAME = "train"
HELP = "train embeddings, or the whole model, on your images"
MODEL = {"name": "model", "pool": "pool", "classes": "classes", "img_size": "img_size", "norm": "norm"}
"""What a settings file can say of the model, and the option that says it."""
SETTINGS: dict[str, type] = {"classification": Augmentation, "segmentation": Views, "captioning": Style}
"""Settings that one task alone has."""
LABELS = {"top1": "top-1", "top5": "top-5", "cross_entropy": "cross-entropy"}
EXAMPLES = """\
examples:
  dtem train --preset few --model deit_tiny_patch16_224 --data photos --eval-data imagenet/val
  dtem train --preset deit_small --data imagenet/train --eval-data imagenet/val --dtype bf16
  dtem train --preset deit_small --mode end-to-end --data imagenet/train --out runs/both
  dtem train --model deit_tiny_patch16_224 --mode finetune --method tome --r 13 --data imagenet/train
  dtem train --preset few --model deit_tiny_patch16_224 --schedule learned --gflops 0.65 --data photos
  dtem train --config my.yaml --lr 3e-4
  accelerate launch --num_processes 8 -m dtem.cli train --preset deit_small --data imagenet/train
  torchrun --nproc-per-node 8 -m -- dtem.cli train --preset deit_small --data imagenet/train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb: the model, and every setting of a run."""
    parser.add_argument("--model", metavar="NAME", help="timm name, e.g. deit_tiny_patch16_224")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weights", metavar="FILE", help="of the model; default: timm's own (downloaded)")
    source.add_argument("--random", action="store_true", help="random weights, to try things out")
    parser.add_argument("--classes", metavar="N", type=int, help="classes of the head, where not the model's own")
    parser.add_argument("--img-size", metavar="N", help="image size where it is not the model's own: 384 or 224x320")
    parser.add_argument("--pool", choices=("token", "avg", "map"), help="how the head reads tokens (MAE: avg)")
    segmentation.add_model_arguments(parser)
    parser.add_argument("--preset", metavar="NAME", help=f"settings to start from: {', '.join(presets())}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win over it, it over --preset")
    parser.add_argument("--restart", action="store_true", help="throw away an earlier run in --out")
    add_flags(parser, TrainConfig, "run settings")


def run(args: argparse.Namespace) -> int:
    """Train, print what came of it."""
    flags = given(args, TrainConfig)
    config, preset = resolve(args.preset, args.config, flags)
    _check_flags(args, config.task, flags)
    _fill(args, preset)
    import torch
    from timm.data.config import resolve_data_config

    from dtem import adapters
    from dtem.measure import flops, record
    from dtem.training.loop import train

    torch.manual_seed(config.seed)  # for --random
    model = builder(config.task)(args, drop_path_rate=0.0 if config.mode == "modular" else config.drop_path)
    size = {}
    if config.task == "classification" and args.img_size is not None:  # timm would take that of the pretrained weights
        size["input_size"] = adapters.find(model).describe(model).image
    data_config = resolve_data_config(size, model=model)  # type: ignore[no-untyped-call]
    named = {name: getattr(args, slot, None) for name, slot in MODEL.items()}
    named = {name: value for name, value in named.items() if value is not None}
    result = train(model, config, data_config, args.restart, named)
    if not result.first:
        return 0
    learned = None
    if result.handle.r == "learned":
        learned = {"r": list(result.handle.plan), "macs": flops.count(model, result.handle.host.image).macs}
    counts = {}
    for rate in result.outcomes:
        result.handle.r = rate
        counts[rate] = flops.count(model, result.handle.host.image)
    rows = [{"r": rate, **found, "macs": counts[rate].macs} for rate, found in result.metrics.items()]
    document = {
        "model": args.model,
        "config": flat(config),
        "updates": result.updates,
        "loss": result.loss if result.updates else None,
        "waiting_for_data": result.waited,
        "skipped": result.skipped,
        "learned": learned,
        "evaluation": rows,
        "files": sorted(path.name for path in result.folder.glob("*.safetensors")),
    }
    record.save(
        record.collect("train", [document], seed=config.seed, command=args.command), result.folder / "record.json"
    )
    common.show(args, document, *_tables(config, result, rows, learned))
    return 0


def _check_flags(args: argparse.Namespace, task: str, flags: dict[str, Any]) -> None:
    """Refuse flags of another task: they would do nothing."""
    from dtem.types import DtemError

    for owner, settings in SETTINGS.items():
        foreign = flags.keys() & {field.name for field in dataclasses.fields(settings)} if owner != task else set()
        if task == "segmentation":
            foreign -= {"flip"}
        if foreign:
            raise DtemError(f"--{min(foreign).replace('_', '-')} is for {owner}, and the task is {task}: leave it out")
    for name in ("encoder", "norm"):
        if task != "segmentation" and getattr(args, name) is not None:
            raise DtemError(f"--{name} is for segmentation, and the task is {task}: leave it out")


def _fill(args: argparse.Namespace, preset: dict[str, Any]) -> None:
    """The model as the preset names it, where no flag says otherwise."""
    from dtem.types import DtemError

    for name, value in preset.items():
        if name not in MODEL:
            raise DtemError(f"model: {name} is not known in a settings file; use {', '.join(MODEL)}")
        slot = MODEL[name]
        if getattr(args, slot) is None:
            setattr(args, slot, str(value) if slot == "img_size" else value)
    if args.model is None:
        raise DtemError("which model? Give --model (a timm name) or a --preset that names one")
    args.pretrained = args.weights is None and not args.random


def _tables(
    config: TrainConfig, result: "Result", rows: list[dict[str, Any]], learned: dict[str, Any] | None
) -> list[Any]:
    slower = "images" if result.waited > 0.5 else "the model"
    lines = [
        f"{result.updates} updates, last loss {result.loss:.4f}; waited for images {100 * result.waited:.0f} % of the "
        f"time (the bottleneck is {slower})"
        if result.updates
        else f"no updates: the embeddings are what sensing {config.sense} batches gave",
        f"files in {result.folder}: {', '.join(sorted(p.name for p in result.folder.glob('*.safetensors')))}",
    ]
    if learned is not None:
        lines.append(f"learned r: {'/'.join(map(str, learned['r']))}, {common.giga(learned['macs'])} GMACs")
    if result.skipped:
        name, reason = next(iter(result.skipped.items()))
        lines.append(f"{len(result.skipped)} images could not be read and were skipped, e.g. {name}: {reason}")
    if not rows:
        return lines
    names = [name for name in rows[0] if name not in ("r", "macs")]
    columns = ("r", *(LABELS.get(name, name) for name in names), "GMACs")
    body = [(row["r"], *(f"{row[name]:.4g}" for name in names), common.giga(row["macs"])) for row in rows]
    return [common.table(f"on {config.eval_data}", columns, body), *lines]
