"""Do learned embeddings caption better than ToMe? On real photographs with real captions, three seeds.

python -m benchmarks.captioning_proof --data DIR                       everything, in runs/captioning
python -m benchmarks.captioning_proof --data DIR --only host           a part: host, train, eval or table
python -m benchmarks.captioning_proof --data DIR --split val --kind mean --rates 13 --out val.json      to choose

DIR holds flickr8k and weights. A small captioner (`captioning_host.py`) is trained on the train split and frozen; its
embeddings are trained on the same split, once per seed; none, ToMe and DTEM caption the test split. What is done is
kept in --work: the same command again goes on.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

import dtem
from benchmarks import captioning_host, common
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.files import write_file
from dtem.measure import flops, record
from dtem.measure.statistics import bootstrap
from dtem.tasks.captioning import evaluator, metric
from dtem.tasks.captioning.captions import open_captions
from dtem.tasks.captioning.outcomes import CaptionOutcomes, with_scores
from dtem.tasks.running import at_rates
from dtem.training.checkpoint_store import ADAPTER

RATES = ("4", "8", "10", "13")
TRAINED_AT = "13"
KINDS: dict[str, dict[str, Any]] = {
    "sparse": {"loss": "distill", "options": {"sparse": True, "temperature": 0.3}},
    "fisher": {"loss": "distill", "options": {"fisher": True}},
}
"""Ways to train the embeddings."""
SINGLE = ("CIDEr", "METEOR", "ROUGE-L")
"""Metrics that have a score for every image."""


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/captioning"))
    parser.add_argument("--only", choices=("host", "train", "eval", "table"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=600, help="optimiser updates of the embeddings")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--captions", type=int, default=2, help="of each image in an update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--kind", choices=(*KINDS, "mean"), default="sparse", help="how DTEM is trained, or the mean")
    parser.add_argument("--split", choices=("test", "val"), default="test", help="val: to choose settings by")
    parser.add_argument("--sizes", action="store_true", help="the decoder counts tokens by size, not once")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--rates", default=",".join(RATES), help="r to evaluate at, with commas")
    parser.add_argument("--limit", type=int, default=300, help="number of evaluation images")
    captioning_host.add_arguments(parser)
    common.add_arguments(parser)
    args = parser.parse_args(command)
    torch.set_num_threads(args.threads)
    names = ("updates", "batch", "captions", "lr", "limit", "host_epochs", "host_batch", "host_lr", "tune_epochs")
    common.check_settings(args.work, {name: getattr(args, name) for name in names})
    host = captioning_host.build(args.data, args.work / "host", args)
    if args.only in (None, "train"):
        for seed in range(args.seeds):
            for kind in KINDS if args.kind == "mean" else (args.kind,):
                learn(args, host, kind, seed)
    if args.only in (None, "eval"):
        for name, rate in variants(args):
            caption(args, host, name, rate)
    if args.only in (None, "eval", "table"):
        rows = table(args, host)
        data = record.data_hash(args.data / "flickr8k" / "captions.json")
        measured = record.collect("captioning", rows, data=data)
        print(f"record: {record.save(measured, args.out or common.RESULTS / 'captioning.json').name}")


def learn(args: argparse.Namespace, host: Path, kind: str, seed: int) -> None:
    """Train embeddings of one kind and seed, unless they are there."""
    folder = args.work / f"{kind}{sizes(args)}-seed{seed}"
    if (folder / "done").exists():
        return
    settings = {
        "r": TRAINED_AT,
        "updates": args.updates,
        "batch_size": args.batch,
        "captions_per_image": args.captions,
        "lr": args.lr,
        "seed": seed,
        "workers": 0,
        "save_every": 10,
        "dtype": "bfloat16",
        "learn": ["embeddings"],
        "loss": KINDS[kind]["loss"],
        "options": KINDS[kind]["options"] | options(args),
    }
    dtem.train(dtem.create_model(str(host)), f"{args.data}/flickr8k/captions.json#train", out=folder, **settings)
    write_file(folder / "done", "")


def sizes(args: argparse.Namespace) -> str:
    """In the names of files: how the decoder counts."""
    return "-sizes" if args.sizes else ""


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"proportional": "everywhere" if args.sizes else True}


def adapter_of(args: argparse.Namespace, seed: str) -> Path:
    """The adapter that is evaluated."""
    parts = {kind: args.work / f"{kind}{sizes(args)}-{seed}" / ADAPTER for kind in KINDS}
    if args.kind != "mean":
        return parts[args.kind]
    path: Path = args.work / f"mean{sizes(args)}-{seed}.safetensors"
    dtem.average_adapters(list(parts.values()), path)
    return path


def variants(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Method and r; the one that takes the longest to be of interest comes last."""
    methods = ["tome", *(f"dtem-seed{seed}" for seed in range(args.seeds))]
    return [("none", "0"), *((method, rate) for rate in reversed(args.rates.split(",")) for method in methods)]


def file_of(args: argparse.Namespace, name: str, rate: str) -> Path:
    kind = f"{args.kind}-" if name.startswith("dtem") else ""
    counted = "" if name == "none" else sizes(args)
    return args.work / f"{args.split}-{kind}{name}{counted}-r{rate}-beam{args.beams}.json"


def caption(args: argparse.Namespace, host: Path, name: str, rate: str) -> None:
    """Captions of the split, and the loss of its reference captions."""
    file = file_of(args, name, rate)
    if file.exists():
        return
    model = dtem.create_model(str(host))
    captioner = evaluator.captioner(model, args.beams)
    if name == "tome":
        captioner = at_rates(dtem.patch(model, "tome", **options(args)), [rate], captioner)[rate]
    elif name != "none":
        handle = dtem.from_pretrained(adapter_of(args, name.removeprefix("dtem-")), model, r=0)
        captioner = at_rates(handle, [rate], captioner)[rate]
    source = open_captions(f"{args.data}/flickr8k/captions.json#{args.split}")
    source.items = source.items[: args.limit]
    source.length = len(source.items)
    loader = Loader(source, eval_transform(resolve_data_config(model)), 20)
    outcomes = evaluator.run_variants({name: captioner}, loader, source.items)[name]
    write_file(file, json.dumps(dataclasses.asdict(outcomes)))
    print(f"{name} r={rate}: loss {outcomes.loss:.4f}, {outcomes.captions_per_second:.2f} captions/s", flush=True)


def table(args: argparse.Namespace, host: Path) -> list[dict[str, Any]]:
    """Scores of all finished variants, averaged over seeds, with paired intervals."""
    source = open_captions(f"{args.data}/flickr8k/captions.json#{args.split}")
    outcomes: dict[tuple[str, str], CaptionOutcomes] = {}
    for name, rate in variants(args):
        if (file := file_of(args, name, rate)).exists():
            outcomes[name, rate] = with_scores(read(file), source.items)
    return rows_of(outcomes, host, args.rates.split(","))


def read(file: Path) -> CaptionOutcomes:
    """What `caption` wrote."""
    return CaptionOutcomes(**json.loads(file.read_text()) | {"scores": None})


def rows_of(outcomes: dict[tuple[str, str], CaptionOutcomes], host: Path, rates: list[str]) -> list[dict[str, Any]]:
    """A row per method and r; `outcomes` are by variant and r."""
    costs = {method: cost(host, method, rates) for method in ("tome", "dtem")}
    rows = []
    for method, rate in [("none", "0"), *((m, r) for r in rates for m in ("tome", "dtem"))]:
        parts = [part for (name, at), part in outcomes.items() if name.partition("-")[0] == method and at == rate]
        if parts:
            rows.append(row(method, rate, parts, outcomes, costs["dtem" if method == "dtem" else "tome"][rate]))
            print(json.dumps(rows[-1]))
    return rows


def cost(host: Path, method: str, rates: list[str]) -> dict[str, dict[str, float]]:
    """MACs of the encoder and number of its output tokens, by r."""
    handle = dtem.patch(dtem.create_model(str(host)), method)
    costs = {}
    for rate in ("0", *rates):
        with handle.at(r=rate):
            count = flops.count(handle.model, handle.host.image)
            costs[rate] = {"gmacs": count.macs / 1e9, "tokens": handle.tokens[-1]}
    return costs


def row(
    method: str,
    rate: str,
    parts: list[CaptionOutcomes],
    outcomes: dict[tuple[str, str], CaptionOutcomes],
    costs: dict[str, float],
) -> dict[str, Any]:
    """Means over seeds; differences from the unmerged model and from ToMe, image by image, seeds averaged first."""
    own = [part.scores for part in parts if part.scores is not None]
    corpus = {
        name: own[0].corpus[name] if isinstance(own[0].corpus[name], str) else _mean([s.corpus[name] for s in own])
        for name in metric.NAMES
    }
    result = {
        "method": method,
        "r": int(rate),
        "seeds": len(parts),
        "images": len(parts[0].captions),
        **corpus,
        **costs,
    }
    result["loss"] = _mean([part.loss for part in parts])
    result["loss_by_seed"] = [part.loss for part in parts]
    result["CIDEr_by_seed"] = [scores.corpus["CIDEr"] for scores in own]
    result["captions_per_second"] = _mean([part.captions_per_second for part in parts])
    for label, other in (("none", ("none", "0")), ("tome", ("tome", rate))):
        if other in outcomes and other[0] != method:
            result[f"against_{label}"] = against(outcomes[other], parts)
    return result


def against(other: CaptionOutcomes, parts: list[CaptionOutcomes]) -> dict[str, Any]:
    pairs = {"loss": (other.loss_by_image(), _columns([part.loss_by_image() for part in parts]))}
    for name in SINGLE:
        if other.scores is not None and name in other.scores.each:
            pairs[name] = (other.scores.each[name], _columns([p.scores.each[name] for p in parts if p.scores]))
    return {name: dataclasses.asdict(bootstrap(a, b)) for name, (a, b) in pairs.items()}


def _columns(rows: list[list[float]]) -> list[float]:
    return [_mean(list(column)) for column in zip(*rows, strict=True)]


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
