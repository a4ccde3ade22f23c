"""BLEU, METEOR, ROUGE-L, CIDEr and SPICE of captions with and without merging, and what people's captions cost in loss.

Every image is decoded once and all contenders caption it; differences in CIDEr and in loss come with the 95 % interval
of a paired bootstrap over images. The metrics are those of the COCO caption evaluation and need Java.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtem.cli import captioning, common, evaluate
from dtem.cli.contenders import REFERENCE, UNMERGED, add_listed_argument, contestants
from dtem.cli.pictures import check_counts
from dtem.cli.segmentation import folder

if TYPE_CHECKING:
    from dtem.handle import Handle
    from dtem.tasks.captioning.evaluate import Written

NAME = "eval"
HELP = evaluate.HELP
EXAMPLES = """\
examples:
  dtem eval --task captioning --model microsoft/git-base-coco --data "coco/dataset_coco.json#test?images=coco" \\
      --r 0,4,8,10,13 --adapter my.safetensors --out results
  dtem eval --task captioning --model runs/captioner --data flickr8k/captions.json#test --limit 100 --beams 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb, for this task."""
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help=captioning.MODEL)
    add("--weights", metavar="FILE", help=captioning.WEIGHTS)
    add("--data", metavar="SPEC", required=True, help=captioning.DATA)
    add("--method", metavar="LIST", default=REFERENCE, help="with commas; default %(default)s, and those of --adapter")
    add(
        "--adapter", metavar="[LABEL=]FILE", action="append", default=[], help="trained embeddings; several with labels"
    )
    add("--r", metavar="LIST", default="0,4,8,10,13", help="tokens merged per block; default %(default)s")
    captioning.add_once_argument(parser)
    captioning.add_style_arguments(parser)
    add("--batch", metavar="N", type=int, default=16, help="images per forward; default %(default)s")
    add("--workers", metavar="N", type=int, default=0, help="processes that decode; default: this one alone")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default %(default)s")
    add("--limit", metavar="N", type=int, help="only N images, drawn at random, the same every time")
    add_listed_argument(parser)
    add("--out", metavar="DIR", help="keep record.json and every caption, captions.json")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print, keep."""
    from timm.data.config import resolve_data_config

    from dtem.measure import record
    from dtem.tasks.captioning import evaluate as running
    from dtem.tasks.captioning import metric
    from dtem.tasks.captioning.data import open_captions
    from dtem.tasks.classification import sources
    from dtem.tasks.classification.data import Loader, eval_transform
    from dtem.tasks.classification.evaluate import evaluating, sample

    check_counts(args, batch=1, workers=0, limit=1)
    if args.out is not None:
        folder(args.out)
    missing = metric.check()
    for reason in dict.fromkeys(missing.values()):
        names = ", ".join(name for name in missing if missing[name] == reason)
        print(f"{names} {reason}: {metric.HELP[reason]}", file=sys.stderr)
    style, rates = captioning.style(args), captioning.rates(args)
    captions = open_captions(args.data)
    args.shortcut = False
    host: Any = captioning.build(args)
    host.to(args.device)
    captioning.check_longest(host, style)
    handles, lists = contestants(args, host)
    captioning.count_as_asked(args, *handles.values())
    source, left_out = sources.without(captions, {name for names in lists.values() for name in names})
    if args.limit is not None:
        source = sample(source, args.limit)
    ready = captioning.contenders(host, handles, rates)
    costs = {name: _cost(name, handles, host) for name in ready}
    transform = eval_transform(resolve_data_config(model=host))  # type: ignore[no-untyped-call]
    loader = Loader(source, transform, args.batch, workers=args.workers)
    named = {f"{label} r={rate}": give for (label, rate), give in ready.items()}
    with (
        evaluating(host, *(handle.model for handle in handles.values())),
        evaluate.progress(None, source.length) as advance,
    ):
        written = running.compete(named, loader, captions.items, style, args.device, advance)
    _keep_captions(args, dict(zip(ready, written.values(), strict=True)))
    found = {key: running.scored(part, captions.items) for key, part in zip(ready, written.values(), strict=True)}
    document = _document(args, found, costs, loader.skipped, left_out)
    common.show(args, document, *_tables(document))
    if args.out is not None:
        record.save(record.collect(NAME, document, seed=0, command=args.command), folder(args.out) / "record.json")
    return 0


def _cost(name: tuple[str, str], handles: "Mapping[str, Handle]", host: Any) -> dict[str, int]:
    """Operations of the vision encoder, and the tokens that it hands to the decoder."""
    from dtem import adapters
    from dtem.measure import flops

    label, rate = name
    if label == UNMERGED:
        spec = adapters.find(host).describe(host)
        model, tokens = host, spec.patches + spec.prefix
    else:
        handle = handles[label]
        handle.r = rate
        spec, model, tokens = handle.host, handle.model, handle.tokens[-1]
    count = flops.count(model, spec.image)
    return {"macs": count.macs, "paper": count.paper, "tokens": tokens}


def _document(
    args: argparse.Namespace,
    found: "Mapping[tuple[str, str], Written]",
    costs: Mapping[tuple[str, str], dict[str, int]],
    skipped: Mapping[str, str],
    left_out: int,
) -> dict[str, Any]:
    from dtem.measure import record

    return {
        "task": "captioning",
        "model": record.plain_command(["", args.model])[1],
        "data": record.plain_command(["", args.data])[1],
        "images": len(found[UNMERGED, "0"].captions),
        "unreadable": dict(skipped),
        "left_out": left_out,
        "beams": args.beams,
        "device": args.device,
        "conventions": common.CONVENTIONS,
        "rows": [_row(name, found, costs[name]) for name in found],
    }


def _row(name: tuple[str, str], found: "Mapping[tuple[str, str], Written]", cost: Mapping[str, int]) -> dict[str, Any]:
    own = found[name]
    assert own.scores is not None
    rivals = {UNMERGED: (UNMERGED, "0"), REFERENCE: (REFERENCE, name[1])}
    return {
        "method": name[0],
        "r": name[1],
        **own.scores.corpus,
        "loss": own.loss,
        **cost,
        "captions_per_second": own.captions_per_second,
        **{
            f"against_{label}": None if other == name or other not in found else against(found[other], own)
            for label, other in rivals.items()
        },
    }


def against(other: "Written", own: "Written") -> dict[str, Any]:
    """By how much a contender is better in CIDEr, and how much lower its loss is, with intervals."""
    from dtem.tasks.captioning.metric import bootstrap

    assert own.scores is not None
    assert other.scores is not None
    pairs = {"loss": (other.loss_by_image(), own.loss_by_image())}
    if "CIDEr" in own.scores.each:
        pairs["CIDEr"] = (other.scores.each["CIDEr"], own.scores.each["CIDEr"])
    return {name: dataclasses.asdict(bootstrap(a, b)) for name, (a, b) in pairs.items()}


def _tables(document: Mapping[str, Any]) -> list[object]:
    from dtem.cli.outcome_tables import points
    from dtem.tasks.captioning.metric import HELP as WAYS
    from dtem.tasks.captioning.metric import NAMES

    def shown(value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:.1f}"

    def gain(one: Mapping[str, Any], label: str) -> str:
        pair = one[f"against_{label}"]
        return "" if pair is None or "CIDEr" not in pair else points(pair["CIDEr"], 1)

    metrics = [name for name in NAMES if name not in ("BLEU-2", "BLEU-3")]
    rows = [
        (
            one["method"],
            one["r"],
            *(shown(one[name]) for name in metrics),
            f"{one['loss']:.4f}",
            common.giga(one["macs"]),
            str(one["tokens"]),
            f"{one['captions_per_second']:.1f}",
            gain(one, UNMERGED),
            gain(one, REFERENCE),
        )
        for one in document["rows"]
    ]
    costs = ("GFLOPs (MACs)", "tokens", "captions/s")
    gains = (f"CIDEr against {UNMERGED}", f"against {REFERENCE}")
    notes = [f"{document['images']} images, {document['beams']} beams; GFLOPs of the vision encoder, tokens handed on"]
    missing = {value for one in document["rows"] for name in NAMES if isinstance(value := one[name], str)}
    notes += [f"{text}: {WAYS[text]}" for text in sorted(missing)]
    if document["unreadable"]:
        notes.append(f"left out: {len(document['unreadable'])} images that cannot be read, see --json")
    if document["left_out"]:
        notes.append(f"left out for all: {document['left_out']} images that an adapter was trained on")
    title = f"{document['model']}, {document['data']}, {document['device']}"
    return [common.table(title, ("method", "r", *metrics, "loss", *costs, *gains), rows, "\n".join(notes))]


def _keep_captions(args: argparse.Namespace, found: "Mapping[tuple[str, str], Written]") -> None:
    """Before they are scored: they took the longest."""
    import json

    from dtem.files import write_file

    if args.out is None:
        return
    texts = {re.sub(r"[^\w.@%+-]", "_", f"{label}-r{rate}"): part.captions for (label, rate), part in found.items()}
    write_file(folder(args.out) / "captions.json", json.dumps(texts, indent=2, ensure_ascii=False) + "\n")
