"""Tables of what `dtem eval` found."""

from collections.abc import Mapping, Sequence
from typing import Any

from dtem.cli import common
from dtem.cli.contenders import REFERENCE, UNMERGED

ROUGH = "im/s: forward only, taken along in this run: a rough number. Trust `dtem bench`."


def draw(document: Mapping[str, Any]) -> list[object]:
    """The document as tables."""
    notes = [f"{document['images']} images", ROUGH]
    left_out = document["left_out"]
    if left_out["listed"]:
        who = ", ".join(left_out["listed"])
        notes.insert(1, f"left out for all: {left_out['images']} images that {who} had been trained on")
    if document["unreadable"]:
        notes.insert(1, f"left out: {len(document['unreadable'])} files that cannot be read, see --json")
    rows = [
        (
            one["method"],
            one["r"],
            f"{one['top1']:.2f}",
            f"{one['top5']:.2f}",
            f"{one['cross_entropy']:.4f}",
            gigas(one),
            common.giga(one["paper"]),
            f"{one['images_per_second']:.0f}",
            str(one["tokens"]),
            "" if one[f"against_{UNMERGED}"] is None else points(one[f"against_{UNMERGED}"]["top1"]),
        )
        for one in document["rows"]
    ]
    title = f"{document['model']}, {document['data']}, {document['device']}, {document['dtype']}"
    costs = ("GFLOPs (MACs)", "GFLOPs (paper)", "im/s", "tokens left")
    columns = ("method", "r", "top-1 %", "top-5 %", "cross-entropy", *costs, f"points against {UNMERGED} (95 %)")
    tables = [common.table(title, columns, rows, "\n".join(notes))]
    if compared := document[f"against_{REFERENCE}"]:
        tables.append(
            pairs(f"Against {REFERENCE} at the same r", [(f"{c['method']}, r={c['r']}", c) for c in compared])
        )
    return tables


def gigas(one: Mapping[str, Any]) -> str:
    """GFLOPs (MACs); where every image has its own, their mean with quartiles."""
    if one.get("macs_quartiles") is None:
        return common.giga(one["macs"])
    low, high = map(common.giga, one["macs_quartiles"])
    return f"{common.giga(one['macs'])} ({low}–{high})"


def points(difference: Mapping[str, float], digits: int = 2) -> str:
    """A difference with its interval."""
    return "{value:+.{d}f} ({low:+.{d}f} … {high:+.{d}f})".format(**difference, d=digits)


def pairs(title: str, compared: Sequence[tuple[str, Mapping[str, Any]]]) -> object:
    """A table of comparisons by name, each a `Paired` of `dtem.tasks.classification.outcomes` as a dict."""
    columns = ("", "images", "top-1 points (95 %)", "right alone", "wrong alone", "McNemar p", "cross-entropy (95 %)")
    rows = [
        (
            name,
            str(pair["n"]),
            points(pair["top1"]),
            str(pair["only_b"]),
            str(pair["only_a"]),
            f"{pair['p']:.2g}",
            points(pair["loss"], 4),
        )
        for name, pair in compared
    ]
    return common.table(title, columns, rows)
