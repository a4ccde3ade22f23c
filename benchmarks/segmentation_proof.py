"""Merging in a Segmenter on real road scenes: none, ToMe and DTEM at each ratio, on images that nothing was tuned on.

python -m benchmarks.segmentation_proof --data DIR --weights FILE               everything
python -m benchmarks.segmentation_proof --data DIR --weights FILE --only host   the Segmenter alone

DIR is CamVid (train and val, each with images and masks), FILE the ImageNet weights of DeiT-T. Three stages, each of
which goes on where it was stopped and is not made again once it is there (in --work):

1. *host*: a Segmenter-T learns on the first images of `train`, without merging. The others of `train` are held out:
   the best moment of the run, and every setting here, was chosen on those.
2. *embeddings*: for each seed, embeddings are trained on the same images beside the frozen Segmenter: by Fisher
   initialisation alone (16 batches), or with ``--set updates=80`` by updates after it, at 40 % merged.
3. *val*: all of them on `val`, image by image, with a bootstrap over images; GFLOPs counted, images per second rough.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch
from torch import nn

import dtem
from benchmarks import common
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.measure import flops, record
from dtem.progress import progress_bar
from dtem.tasks.running import Forward, at_rates, eval_mode
from dtem.tasks.segmentation import evaluator
from dtem.tasks.segmentation.mask_datasets import open_pairs
from dtem.tasks.segmentation.mask_transforms import eval_transform
from dtem.tasks.segmentation.outcomes import SegmentationOutcomes, paired
from dtem.training.checkpoint_store import ADAPTER, BEST_HOST

CROP, IMAGE = (256, 320), (360, 480)
TRAINED = 319
"""The first so many of 367 images are trained on; the last 48 are held out."""
RATIOS = ("20%", "30%", "40%", "50%")
SHARED = {"learn": ["embeddings"], "workers": 0, "batch_size": 8, "scales": (0.6, 1.6), "save_every": 20}
HOST = {"mode": "finetune", "method": "tome", "r": "0", "eval_r": "0", "updates": 720, "eval_every": 240}
HOST |= {"host_lr": 2e-4, "warmup": 30, "dtype": "bfloat16", "weight_decay": 1e-2, "drop_path": 0.0}
EMBEDDINGS = {
    "mode": "modular",
    "method": "dtem",
    "r": "40%",
    "eval_r": "40%",
    "fisher_init": 16,
    "epochs": 0.0,
    "updates": 0,
}
EMBEDDINGS |= {"eval_every": 80, "lr": 1e-3, "loss": "task", "photometric": False}
PLAIN = {"tome": "tome without sizes", "dtem": "dtem without sizes"}
"""The same without proportional attention: a merged token counts as one there."""
OPTIONS = {"relaxed": 64, "dim": 64, "fisher": 0, "temperature": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, default=Path("runs/segmentation"))
    parser.add_argument("--only", choices=("host", "embeddings", "val"), help="stop after this stage")
    parser.add_argument("--split", choices=("held", "val"), default="val", help="held: to choose settings by")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="other settings of stage 2")
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    learn_host(args)
    if args.only == "host":
        return
    for seed in seeds:
        learn_embeddings(args, seed)
    if args.only == "embeddings":
        return
    rows = evaluate(args, seeds)
    for row in rows:
        print(row)
    if args.split == "val":
        path = args.out or common.RESULTS / "segmentation_proof.json"
        data = record.data_hash(args.data / "val")
        record.save(record.collect("segmentation_proof", rows, seed=seeds[0], data=data), path)


def data_specs(args: argparse.Namespace) -> dict[str, str]:
    """Training images, held-out images for choosing settings, and the evaluation images."""
    train = f"camvid:{args.data}#train?part="
    return {"train": f"{train}0:{TRAINED}", "held": f"{train}{TRAINED}:", "val": f"camvid:{args.data}#val"}


def host(args: argparse.Namespace, trained: bool = True) -> nn.Module:
    torch.manual_seed(0)
    weights = {"weights": args.work / "host" / BEST_HOST} if trained else {"encoder_weights": args.weights}
    return dtem.create_model("seg_t_mask_16", num_classes=11, img_size=CROP, pixel_norm="imagenet", **weights)


def run(args: argparse.Namespace, model: nn.Module, out: Path, settings: dict) -> None:
    data, started = data_specs(args), time.process_time()
    dtem.train(model, data["train"], out=out, **{**SHARED, "eval_data": data["held"], **settings})
    print(f"{out.name}: {time.process_time() - started:.0f} s of processor time", flush=True)


def learn_host(args: argparse.Namespace) -> None:
    out = args.work / "host"
    if not (out / "done").exists():
        run(args, host(args, trained=False), out, HOST)
        (out / "done").touch()


def learn_embeddings(args: argparse.Namespace, seed: int) -> None:
    out = args.work / folder(args, seed)
    if not (out / "done").exists():
        changed = dict(pair.split("=", 1) for pair in args.set)
        typed = {name: type({**EMBEDDINGS, **OPTIONS}.get(name, ""))(value) for name, value in changed.items()}
        options = {**OPTIONS, **{name: typed.pop(name) for name in OPTIONS.keys() & typed.keys()}}
        options["fisher"] = bool(options["fisher"])
        run(args, host(args), out, {**EMBEDDINGS, **typed, "options": options, "seed": seed})
        (out / "done").touch()


def folder(args: argparse.Namespace, seed: int) -> str:
    return "-".join(["embeddings", *sorted(args.set), f"seed{seed}"]).replace("=", "")


def evaluate(args: argparse.Namespace, seeds: list[int]) -> list[dict]:
    """Every variant on every image, then the table."""
    model, source = host(args), open_pairs(data_specs(args)[args.split])
    handles = {
        "tome": dtem.patch(host(args), "tome"),
        PLAIN["tome"]: dtem.patch(host(args), "tome", proportional=False),
    }
    files = [args.work / folder(args, seed) / ADAPTER for seed in seeds]
    for seed, file in zip(seeds, files, strict=True):
        handles[f"dtem-{seed}"] = dtem.from_pretrained(file, host(args), r=0)
        handles[f"{PLAIN['dtem']}-{seed}"] = dtem.from_pretrained(file, host(args), r=0, proportional=False)
    timed = {"none": Timed(model)}
    for label, handle in handles.items():
        timed |= {f"{label}-{ratio}": Timed(forward) for ratio, forward in at_rates(handle, RATIOS).items()}
    out = args.work / f"{args.split}{'-'.join(['', *sorted(args.set)])}"
    out.mkdir(parents=True, exist_ok=True)
    weights = [record.data_hash(file)[:12] for file in (args.work / "host" / BEST_HOST, *files)]
    store = evaluator.OutcomeStore(out, f"{args.split}, weights {' '.join(weights)}", list(timed))
    outcomes = store.outcomes
    if (remaining := evaluator.remaining_images(source, store.done)) is not None:
        loader = Loader(
            remaining, eval_transform(resolve_data_config(model), source.classes), 1, on_decode_error="stop"
        )
        models = [model, *(handle.model for handle in handles.values())]
        with eval_mode(*models), progress_bar(remaining.length) as advance:
            outcomes = store.save(evaluator.run_variants(timed, loader, 11, progress=advance, save=store.save))
    return table(outcomes, handles, model, seeds, {name: each.per_second for name, each in timed.items()})


class Timed:
    """A forward that measures its processor time: other programs may be running on this machine."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.times: list[float] = []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        started = time.process_time()
        scores = self.forward(images)
        self.times.append((time.process_time() - started) / len(images))
        return scores

    @property
    def per_second(self) -> float | None:
        return 1 / sorted(self.times)[len(self.times) // 2] if self.times else None


def table(
    outcomes: dict[str, SegmentationOutcomes],
    handles: dict[str, dtem.Handle],
    model: nn.Module,
    seeds: list[int],
    speeds: dict[str, float | None],
) -> list[dict]:
    rows = [row("none", "0", [outcomes["none"]], flops.count(model, (3, *IMAGE)).macs, speeds["none"])]
    for ratio in RATIOS:
        for method in ("tome", "dtem", *PLAIN.values()):
            labels = [f"{method}-{seed}" for seed in seeds] if method.startswith("dtem") else [method]
            handle = handles[labels[0]]
            with handle.at(r=ratio):
                macs = flops.count(handle.model, (3, *IMAGE)).macs
            parts = [outcomes[f"{label}-{ratio}"] for label in labels]
            line = row(method, ratio, parts, macs, speeds[f"{labels[0]}-{ratio}"])
            line["against_none"] = dataclasses.asdict(paired(outcomes["none"], parts))
            if method.startswith("dtem"):
                rival = method.replace("dtem", "tome")
                line["against_tome"] = dataclasses.asdict(paired(outcomes[f"{rival}-{ratio}"], parts))
            rows.append(line)
    return rows


def row(method: str, ratio: str, parts: list[SegmentationOutcomes], macs: int, speed: float | None) -> dict:
    return {
        "method": method,
        "ratio": ratio,
        "miou": sum(part.miou for part in parts) / len(parts),
        "miou_by_seed": [part.miou for part in parts],
        "pixel_accuracy": sum(part.accuracy for part in parts) / len(parts),
        "iou": torch.stack([part.iou for part in parts]).mean(0).tolist(),
        "images": len(parts[0]),
        "gmacs": macs / 1e9,
        "images_per_cpu_second": speed,
    }


if __name__ == "__main__":
    main()
