"""Merging in a Segmenter on real road scenes: none, ToMe and DTEM at each ratio, on images that nothing was tuned on.

python benchmarks/segmentation_proof.py --data DIR --weights FILE               everything
python benchmarks/segmentation_proof.py --data DIR --weights FILE --only host   the Segmenter alone

DIR is CamVid (train and val, each with images and masks), FILE the ImageNet weights of DeiT-T. Three stages, each of
which goes on where it was stopped and is not made again once it is there (in --work):

1. *host*: a Segmenter-T learns on the first images of `train`, without merging. The others of `train` are held out:
   the best moment of the run, and every setting here, was chosen on those.
2. *embeddings*: for each seed, embeddings are found on the same images, the Segmenter being frozen: by sensing alone
   (`ops.sensitivity`; 16 batches), or with ``--set updates=80`` by updates after it, at 40 % merged.
3. *val*: all of them on `val`, image by image, with a bootstrap over images; GFLOPs counted, images per second rough.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import common
import torch
from timm.data.config import resolve_data_config
from tqdm import tqdm

import dtem
from dtem.cli.segmentation import NORMS
from dtem.hosts import segmenter, segmenter_weights
from dtem.measure import flops, record
from dtem.tasks.classification.evaluate import at_rates, evaluating
from dtem.tasks.segmentation import evaluate
from dtem.tasks.segmentation.outcomes import Areas, paired
from dtem.tasks.segmentation.pairs import open_pairs
from dtem.tasks.segmentation.views import eval_transform
from dtem.training.config import TrainConfig, build
from dtem.training.loop import train

CROP, IMAGE = (256, 320), (360, 480)
TRAINED = 319
"""The first so many of 367 images are trained on; the last 48 are held out."""
RATIOS = ("20%", "30%", "40%", "50%")
SHARED = {"task": "segmentation", "workers": 0, "batch": 8, "scales": (0.6, 1.6), "save_every": 20}
HOST = {"mode": "finetune", "method": "tome", "r": "0", "eval_r": "0", "updates": 720, "eval_every": 240}
HOST |= {"host_lr": 2e-4, "warmup": 30, "dtype": "bf16", "weight_decay": 1e-2, "drop_path": 0.0}
EMBEDDINGS = {
    "mode": "modular",
    "method": "dtem",
    "r": "40%",
    "eval_r": "40%",
    "sense": 16,
    "epochs": 0.0,
    "updates": 0,
}
EMBEDDINGS |= {"eval_every": 80, "lr": 1e-3, "loss": "task", "photometric": False}
PLAIN = {"tome": "tome without sizes", "dtem": "dtem without sizes"}
"""The same without proportional attention: a merged token counts as one there."""
OPTIONS = {"relaxed": 64, "dim": 64, "priced": 0, "temperature": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, default=Path("runs/segmentation"))
    parser.add_argument("--only", choices=("host", "embeddings", "val"), help="stop after this stage")
    parser.add_argument("--judge", choices=("held", "val"), default="val", help="held: to choose settings by")
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
    rows = judge(args, seeds)
    for row in rows:
        print(row)
    if args.judge == "val":
        path = args.out or common.RESULTS / "segmentation_proof.json"
        data = record.data_hash(args.data / "val")
        record.save(record.collect("segmentation_proof", rows, seed=seeds[0], data=data), path)


def parts(args: argparse.Namespace) -> dict[str, str]:
    """What is learned from, what settings are chosen by, and what nothing is chosen by."""
    train = f"camvid:{args.data}#train?part="
    return {"train": f"{train}0:{TRAINED}", "held": f"{train}{TRAINED}:", "val": f"camvid:{args.data}#val"}


def host(args: argparse.Namespace, trained: bool = True) -> segmenter.Segmenter:
    torch.manual_seed(0)
    mean, std = NORMS["imagenet"]
    model = segmenter.create("seg_t_mask_16", 11, CROP, mean=mean, std=std)
    if trained:
        return segmenter_weights.load_weights(model, args.work / "host" / "best_model.safetensors").eval()
    return segmenter_weights.load_encoder(model, args.weights)


def run(args: argparse.Namespace, model: segmenter.Segmenter, out: Path, settings: dict) -> None:
    where = parts(args)
    config = build({**SHARED, "data": where["train"], "eval_data": where["held"], "out": str(out), **settings})
    assert isinstance(config, TrainConfig)
    started = time.process_time()
    train(model, config, resolve_data_config(model=model))
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
        options["priced"] = bool(options["priced"])
        run(args, host(args), out, {**EMBEDDINGS, **typed, "options": options, "seed": seed})
        (out / "done").touch()


def folder(args: argparse.Namespace, seed: int) -> str:
    return "-".join(["embeddings", *sorted(args.set), f"seed{seed}"]).replace("=", "")


def judge(args: argparse.Namespace, seeds: list[int]) -> list[dict]:
    """Every contender on every image, then the table."""
    model, source = host(args), open_pairs(parts(args)[args.judge])
    handles = {
        "tome": dtem.patch(host(args), "tome"),
        PLAIN["tome"]: dtem.patch(host(args), "tome", proportional=False),
    }
    files = [args.work / folder(args, seed) / "adapter.safetensors" for seed in seeds]
    for seed, file in zip(seeds, files, strict=True):
        handles[f"dtem-{seed}"] = dtem.from_pretrained(file, host(args), r=0)
        handles[f"{PLAIN['dtem']}-{seed}"] = dtem.from_pretrained(file, host(args), r=0, proportional=False)
    timed = {"none": Timed(model)}
    for label, handle in handles.items():
        timed |= {f"{label}-{ratio}": Timed(forward) for ratio, forward in at_rates(handle, RATIOS).items()}
    out = args.work / f"{args.judge}{'-'.join(['', *sorted(args.set)])}"
    out.mkdir(parents=True, exist_ok=True)
    weights = [record.data_hash(file)[:12] for file in (args.work / "host" / "best_model.safetensors", *files)]
    kept = evaluate.Kept(out, f"{args.judge}, weights {' '.join(weights)}", list(timed))
    found = kept.found
    if (left := evaluate.images_left(source, kept.done)) is not None:
        transform = eval_transform(resolve_data_config(model=model), source.classes)
        loader = evaluate.open_loader(left, transform, 0)
        with evaluating(model, *(handle.model for handle in handles.values())), tqdm(total=left.length) as bar:
            found = kept.save(evaluate.compete(timed, loader, 11, progress=bar.update, after=kept.save))
    return table(found, handles, model, seeds, {name: one.per_second for name, one in timed.items()})


class Timed:
    """A forward that remembers how long it took, in processor time: others may be at work on this machine."""

    def __init__(self, forward) -> None:
        self.forward, self.times = forward, []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        started = time.process_time()
        scores = self.forward(images)
        self.times.append((time.process_time() - started) / len(images))
        return scores

    @property
    def per_second(self) -> float | None:
        return 1 / sorted(self.times)[len(self.times) // 2] if self.times else None


def table(found: dict[str, Areas], handles: dict, model, seeds: list[int], speeds: dict) -> list[dict]:
    def counted(one) -> int:
        return flops.count(one, (3, *IMAGE)).macs

    rows = [row("none", "0", [found["none"]], counted(model), speeds["none"])]
    for ratio in RATIOS:
        for method in ("tome", "dtem", *PLAIN.values()):
            labels = [f"{method}-{seed}" for seed in seeds] if method.startswith("dtem") else [method]
            handle = handles[labels[0]]
            handle.r = ratio
            areas = [found[f"{label}-{ratio}"] for label in labels]
            line = row(method, ratio, areas, counted(handle.model), speeds[f"{labels[0]}-{ratio}"])
            line["against_none"] = dataclasses.asdict(paired(found["none"], areas))
            if method.startswith("dtem"):
                rival = method.replace("dtem", "tome")
                line["against_tome"] = dataclasses.asdict(paired(found[f"{rival}-{ratio}"], areas))
            rows.append(line)
    return rows


def row(method: str, ratio: str, areas: list[Areas], macs: int, speed: float | None) -> dict:
    return {
        "method": method,
        "ratio": ratio,
        "miou": sum(part.miou for part in areas) / len(areas),
        "miou_by_seed": [part.miou for part in areas],
        "pixel_accuracy": sum(part.accuracy for part in areas) / len(areas),
        "iou": torch.stack([part.iou for part in areas]).mean(0).tolist(),
        "images": len(areas[0]),
        "gmacs": macs / 1e9,
        "images_per_cpu_second": speed,
    }


if __name__ == "__main__":
    main()
