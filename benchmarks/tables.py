"""Write the tables of README.md and docs, and the plots that go with them, from the records in benchmarks/results.

python -m benchmarks.tables            rewrite them
python -m benchmarks.tables --check    exit 1 if they are not in step with the records
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common, frozen_tables
from dtem.measure import record
from dtem.measure.statistics import Difference

ROOT = Path(__file__).resolve().parent.parent
CARDS = sorted((ROOT / "src" / "dtem" / "adapters" / "shipped").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *CARDS]
NAMES = {
    "deit_tiny_patch16_224": "DeiT-T",
    "deit_small_patch16_224": "DeiT-S",
    "deit_base_patch16_224": "DeiT-B",
    "vit_small_patch16_384": "AugReg ViT-S 384",
}


def speed(rows: list[dict[str, Any]], batches: tuple[int, ...] = (1, 16, 32)) -> list[list[str]]:
    head = ["model", "batch", "r", "MACs ratio", "speed-up", "over the same code", "of the oracle", "plain ToMe"]
    table = [[*head, "over plain ToMe"]]
    parts = ("speedup", "over_same", "of_oracle", "plain_tome_speedup", "over_plain_tome")
    for row in rows:
        if row["batch"] in batches:
            case = [NAMES[row["model"]], str(row["batch"]), str(row["r"]), f"{row['macs_ratio']:.2f}"]
            table.append([*case, *(common.spread(row[part]) for part in parts)])
    return table


def long_inputs(rows: list[dict[str, Any]]) -> list[list[str]]:
    head = ["tokens", "r", "MACs ratio", "unmerged", "merged", "speed-up", "over the same code", "of the oracle"]
    table = [[*head, "memory: unmerged", "merged"]]
    for row in rows:
        times = [f"{row['milliseconds'][name]:.0f} ms" for name in ("unmerged", "dtem")]
        ratios = [common.spread(row[part]) for part in ("speedup", "over_same", "of_oracle")]
        peaks = [f"{row['peak_bytes'][name] / 1e6:.0f} MB" for name in ("unmerged", "dtem")]
        table.append([str(row["tokens"]), str(row["r"]), f"{row['macs_ratio']:.2f}", *times, *ratios, *peaks])
    return table


def summary(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Speed at batch 32 beside the accuracy of the shipped adapter at the same r (DeiT-T)."""
    norms_record = record.load_record(common.RESULTS / "norms_deit_tiny_patch16_224.json").results
    accuracy = {(row["variant"], row["r"]): row for row in norms_record if "kl" in row}
    head = ["r", "fewer MACs", "speed-up", "by merging alone", "top-1 %: unmerged", "ToMe", "embeddings", "and norms"]
    table = [[*head, "against ToMe (95 %)"]]
    for row in rows:
        if (row["model"], row["batch"]) == ("deit_tiny_patch16_224", 32):
            r = row["r"]
            measured = [accuracy["unmerged", 0], *(accuracy[name, r] for name in ("tome", "embeddings", "both"))]
            fewer = f"{100 * (1 - 1 / row['macs_ratio']):.0f} %"
            gain = _interval(accuracy["both", r]["top1_gain"], 1)
            numbers = [f"{each['top1']:.1f}" for each in measured]
            ratios = [common.spread(row[part]) for part in ("speedup", "over_same")]
            table.append([str(r), fewer, *ratios, *numbers, gain])
    return table


def grouping(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["soft grouping, forward + backward", "time", "faster", "kept for backward", "fewer bytes"]]
    for row in rows:
        time, megabytes = f"{row['milliseconds']:.0f} ms", f"{row['saved_bytes'] / 1e6:.1f} MB"
        table.append([row["name"], time, common.spread(row["speedup"]), megabytes, f"{row['fewer_bytes']:.1f} ×"])
    return table


def attention(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["batch", "tokens", "pass", "mask", "channel", "as dtem does"]]
    for key in dict.fromkeys((row["batch"], row["tokens"], row["training"]) for row in rows):
        by_way = {r["way"]: r for r in rows if (r["batch"], r["tokens"], r["training"]) == key}
        own = f"{by_way['as dtem']['milliseconds']:.2f} ms" if "as dtem" in by_way else "channel"
        times = [f"{by_way[way]['milliseconds']:.2f} ms" for way in ("mask", "channel")]
        table.append([str(key[0]), str(key[1]), "forward + backward" if key[2] else "forward", *times, own])
    return table


def projection(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["width", "batch", "qkv alone", "qkv and embedding, two products", "one product"]]
    for row in rows:
        table.append([str(row["width"]), str(row["batch"]), *(f"{v:.2f} ms" for v in row["milliseconds"].values())])
    return table


def operations(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["model", "image", "batch", "r", "operation", "unmerged", "plain ToMe", "merged", "oracle"]]
    for row in rows:
        named = [NAMES[row["model"]], str(row.get("image", 224)), str(row["batch"]), str(row["r"]), row["group"]]
        columns = (row.get(column) for column in ("unmerged", "plain_tome", "merged", "oracle"))
        table.append([*named, *("" if value is None else f"{value:.1f} ms" for value in columns)])
    return table


def memory(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["model", "r", "autocast", "per image", f"batch {rows[0]['batch']}", "with --grad-checkpointing"]]
    for bf16 in (False, True):
        plain, again = (next(r for r in rows if (r["checkpointing"], r["bf16"]) == (c, bf16)) for c in (False, True))
        each = f"{plain['bytes_per_image'] / 1e6:.0f} MB"
        totals = [f"{row['bytes'] / 1e9:.1f} GB" for row in (plain, again)]
        table.append([NAMES[plain["model"]], str(plain["r"]), "bf16" if bf16 else "none", each, *totals])
    return table


def training_step(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["model", "batch", "r", "unmerged, frozen", "soft", "cost", "sparse", "sparse over soft"]]
    for base, soft, sparse in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        times = [f"{row['seconds']:.2f} s" for row in (base, soft, sparse)]
        cost = f"{1 / soft['speedup']['median']:.2f} ×"
        gain = f"{sparse['speedup']['median'] / soft['speedup']['median']:.2f} × faster"
        table.append([NAMES[base["model"]], str(base["batch"]), str(base["r"]), *times[:2], cost, times[2], gain])
    return table


def captioning_speed(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["model", "r", "batch", "beams", "tokens", "encoder", "decoder", "whole"]]
    for row in rows:
        parts = [common.spread(row[part]["speedup"]) for part in ("encoder", "decoder", "whole")]
        table.append([row["model"], *(str(row[key]) for key in ("r", "batch", "beams", "tokens")), *parts])
    return table


def vlm_speed(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [
        ["variant", "tokens", "tower", "first word", "words/s", "peak memory", "cache", "first word against dropping"]
    ]
    for row in rows:
        name = row["variant"] if row["variant"] == "unmerged" else f"{row['variant']}, r = {row['r']}"
        if row["variant"] == "dropped":
            name = f"dropped after the tower, as r = {row['r']}"
        times = [
            f"{row[f'{part}_seconds']:.2f} s, {common.spread(row[f'{part}_speedup'])}" for part in ("tower", "first")
        ]
        against = common.spread(row["first_against_dropped"]) if "first_against_dropped" in row else ""
        memory = [f"{row['peak_bytes'] / 1e6:.0f} MB", f"{row['cache_bytes'] / 1e6:.1f} MB"]
        table.append([name, str(row["tokens"]), *times, f"{1 / row['word_seconds']:.1f}", *memory, against])
    return table


def segmentation_flops(rows: list[dict[str, Any]]) -> list[list[str]]:
    """ToMe and DTEM side by side."""
    table = [["r", "MACs, ToMe", "ToMe, paper", "ToMe, counted", "MACs, DTEM", "DTEM, paper", "DTEM, counted"]]
    by_ratio: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_ratio.setdefault(row["ratio"] or "0", {})[row["method"]] = row
    for ratio, methods in by_ratio.items():
        line = [f"{100 * float(ratio):.0f} %" if float(ratio) else "0"]
        for name in ("tome", "dtem"):
            row = methods.get(name) or (methods.get("unmerged") if name == "tome" else None)
            line += ["", "", ""] if row is None else _segmenter_gflops(row)
        table.append(line)
    return table


def _segmenter_gflops(row: dict[str, Any]) -> list[str]:
    return [f"{row['macs'] / 1e9:.2f}", f"{row['printed']:.2f}", f"{row['paper'] / 1e9:.2f}"]


def segmentation_speed(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["image", "tokens", "batch", "ratio", "method", "unmerged", "merged", "MACs ratio", "speed-up"]]
    for row in rows:
        times = [f"{row[key]:.0f} ms" for key in ("unmerged_milliseconds", "milliseconds")]
        size = f"{row['size']} × {row['size']}"
        case = [size, str(row["tokens"]), str(row["batch"]), str(row["ratio"]), row["method"]]
        table.append([*case, *times, f"{row['macs_ratio']:.2f}", common.spread(row["speedup"])])
    return table


def _difference(difference: dict[str, float], digits: int) -> str:
    return "{value:+.{d}f} ({low:+.{d}f} … {high:+.{d}f})".format(**difference, d=digits)


def adaptive(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["tokens compared by", "GFLOPs, mean (quartiles)", "r", "top-1 %", "cross-entropy", "points (95 %)"]]
    for row in rows:
        low, high = (f"{value / 1e9:.2f}" for value in row["macs_quartiles"] or (0, 0))
        spread = f" ({low}–{high})" if row["macs_quartiles"] else ""
        numbers = [f"{row['top1']:.1f}", f"{row['cross_entropy']:.3f}", _gain(row["against_constant"])]
        table.append([row["metric"], f"{row['macs'] / 1e9:.3f}{spread}", row["kind"], *numbers])
    return table


def learned_schedule(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["seed", "schedule", "r", "GFLOPs", "top-1 %", "cross-entropy", "points against constant (95 %)"]]
    for row in rows:
        if "seed" in row:
            numbers = [f"{row['gmacs']:.3f}", f"{row['top1']:.1f}", f"{row['loss']:.3f}"]
            table.append([str(row["seed"]), row["schedule"], row["r"], *numbers, _gain(row["against_constant"])])
        else:
            mean = f"{row['loss']['value']:+.3f}"
            table.append([f"{row['seeds']} seeds", row["schedule"], "", "", "", mean, _gain(row)])
    return table


def rivals(results: dict[str, Any]) -> list[list[str]]:
    table = [
        [
            "method",
            "learned",
            "GFLOPs",
            "top-1 %",
            "points to ToMe (95 %)",
            "cross-entropy",
            "speed-up, batch 1",
            "at 32",
        ]
    ]
    for row in results["rows"]:
        gigas = f"{row['macs'] / 1e9:.3f}"
        faster = [common.spread(row["speedup"][size]) for size in ("1", "32")]
        gain = _gain(row["against_tome"])
        scores = [f"{row['top1']:.1f}", gain, f"{row['cross_entropy']:.3f}"]
        method = row["method"].replace("dtem_no_prop", "dtem, proportional=False")
        table.append([method, row["learned"], gigas, *scores, *faster])
    return table


def _gain(pair: dict[str, Any] | None) -> str:
    return "" if pair is None else _difference(pair["top1"], 1)


def features(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["r", "features merged by", "k-NN accuracy, %", "against ToMe (95 %)", "GFLOPs"]]
    for row in sorted(rows, key=lambda row: int(row["r"])):
        name = {"tome": "ToMe"}.get(row["method"], row["method"])
        table.append([row["r"], name, f"{row['top1']:.1f}", _gain(row["against_tome"]), f"{row['macs'] / 1e9:.2f}"])
    return table


def proof(rows: list[dict[str, Any]]) -> list[list[str]]:
    table = [["seed", "r", "photographs", "ToMe", "DTEM", "points (95 %)", "cross-entropy (95 %)"]]
    for row in rows:
        both, numbers = row["paired"], [f"{row[name]:.2f}" for name in ("tome", "dtem")]
        differences = [_difference(both["top1"], 2), _difference(both["loss"], 3)]
        seed = {"mean": "mean of these", "all": "all in one adapter"}.get(row["seed"], str(row["seed"]))
        table.append([seed, str(row["r"]), f"{both['n']:,}", *numbers, *differences])
    return table


def precision(rows: list[dict[str, Any]]) -> list[list[str]]:
    head = ["model", "r", "precision", "merged the same", "of the rest, no near tie", "logits: typical difference"]
    table = [[*head, "same class"]]
    for row in rows:
        name = f"autocast {row['dtype']}" if row["autocast"] else row["dtype"]
        shares = f"{100 * row['merged_the_same']:.1f} %", f"{100 * row['not_near']:.2f} % of all"
        difference = f"{row['typical_difference']:.2g} (they span {row['logit_range']:.0f})"
        same = f"{row['same_class']} of {row['images']}"
        table.append([NAMES[row["model"]], str(row["r"]), name, *shares, difference, same])
    return table


def export_speed(rows: list[dict[str, Any]]) -> list[list[str]]:
    heads = ["batch", "threads", "r", "MACs ratio", "speed-up", "of the ratio", "by dropping", "same writing"]
    table = [["model", *heads, "unmerged", "merged"]]
    for row in rows:
        times = [f"{row[key]:.1f} ms" for key in ("unmerged_milliseconds", "milliseconds")]
        shares = [f"{row[key]:.2f}" for key in ("of_macs_ratio", "dropping_of_macs_ratio", "same_of_macs_ratio")]
        first = [*(str(row[key]) for key in ("batch", "threads", "r")), f"{row['macs_ratio']:.2f}"]
        table.append([NAMES[row["model"]], *first, common.spread(row["speedup"]), *shares, *times])
    return table


def tuning(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Constant r and the plan that was tuned for its time, side by side."""
    heads = ["constant r", "ms", "speed-up", "KL", "tuned plan", "ms", "speed-up", "KL", "difference of KL (95 %)"]
    table = [["model", "batch", *heads]]
    for row in rows:
        line = [NAMES[row["model"]], str(row["batch"]), str(row["r"])]
        for kind in ("constant", "tuned"):
            own = row[kind]
            line += ["/".join(map(str, own["plan"]))] if kind == "tuned" else []
            line += [f"{own['milliseconds']:.2f}", common.spread(own["speedup"]), f"{own['kl']:.4f}"]
        low, high = row["kl_interval"]
        table.append([*line, f"{row['kl_difference']:+.4f} ({low:+.4f} … {high:+.4f})"])
    return table


def composition(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Unmerged and merged side by side, by engine and precision."""
    table = [["engine", "precision", "r", "top-1 %", "cross-entropy", "drift (KL)", "groups changed", "speed-up"]]
    for key in dict.fromkeys((row["engine"], row["precision"]) for row in rows if row["r"]):
        for row in rows:
            if (row["engine"], row["precision"]) == key:
                changed = row.get("groups_changed")
                numbers = [f"{row['top1']:.1f}", f"{row['cross_entropy']:.3f}", f"{max(row['drift'], 0):.4f}"]
                groups = "" if changed is None else f"{100 * changed:.0f} %"
                table.append([*key, str(row["r"]), *numbers, groups, common.spread(row["speedup"])])
    return table


PARTS = {"tome": "ToMe", "embeddings": "embeddings", "tome + norms": "ToMe + norms", "both": "embeddings + norms"}


def norms(rows: list[dict[str, Any]]) -> list[list[str]]:
    """What embeddings and norms each bring, paired with ToMe."""
    table = [["r", "", "top-1 %", "against ToMe (95 %)", "cross-entropy", "against ToMe (95 %)", "KL"]]
    measured = [row for row in rows if "kl" in row]
    for row in sorted(measured, key=lambda row: row["r"]):
        gains = [_interval(row.get(f"{name}_gain"), digits) for name, digits in (("top1", 1), ("cross_entropy", 3))]
        name = PARTS.get(row["variant"], row["variant"])
        values = [f"{row['top1']:.1f}", gains[0], f"{row['cross_entropy']:.3f}", gains[1], f"{row['kl']:.4f}"]
        table.append([str(row["r"]), name, *values])
    return table


def card(rows: list[dict[str, Any]]) -> list[list[str]]:
    """`norms` at the r of cards, and unmerged."""
    return norms([row for row in rows if row["r"] in (0, 8, 13, 16)])


def _interval(values: list[float] | None, digits: int) -> str:
    return "" if values is None else Difference(*values).text(digits)


def norms_shift(rows: list[dict[str, Any]], blocks: tuple[int, ...] = (1, 3, 5, 7, 9, 10)) -> list[list[str]]:
    """Standard deviation of the tokens that the second norm of some blocks reads, by token size."""
    measured = {row["variant"]: row["spread_by_size"] for row in rows if "spread_by_size" in row}
    table = [["tokens of size", "", *(f"block {block + 1}" for block in blocks)]]
    for variant in ("tome", "both"):
        for label, means in measured[variant].items():
            table.append([label, PARTS[variant], *(f"{means[block]:.2f}" for block in blocks)])
    return table


def rope_places(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Ways to place merged tokens of a host with rotary positions, against the mean of their patches."""
    table = [["position of a merged token", "r", "top-1 %", "against the mean (95 %)", "KL", "against the mean (95 %)"]]
    for row in rows:
        gains = [_interval(row.get(f"{name}_difference"), digits) for name, digits in (("top1", 1), ("kl", 3))]
        table.append([row["way"], str(row["r"]), f"{row['top1']:.1f}", gains[0], f"{row['kl']:.3f}", gains[1]])
    return table


def demo(rows: list[dict[str, Any]]) -> list[list[str]]:
    """`dtem demo`, one row per seed."""
    table = [["seed", "updates", "speed-up, batch 32", "top-1 %: unmerged", "ToMe", "DTEM", "against ToMe (95 %)"]]
    for row in rows:
        headline = row["headline"]
        table.append(
            [
                str(row["seed"]),
                str(row["updates"]),
                common.spread(headline["speed"]["dtem"]["speedup"]),
                *(f"{headline[name]:.1f}" for name in ("unmerged", "tome", "dtem")),
                Difference(**headline["difference"]).text(1),
            ]
        )
    return table


TABLES: dict[str, tuple[str, Callable[[Any], list[list[str]]]]] = {
    "adaptive": ("adaptive", adaptive),
    "demo": ("demo", demo),
    "learned-schedule": ("learned_schedule", learned_schedule),
    "rivals": ("rivals", rivals),
    "frozen": ("frozen", frozen_tables.frozen),
    "frozen-norms": ("frozen", frozen_tables.norms),
    "similarity-terms": ("frozen", frozen_tables.terms),
    "features": ("features", features),
    "proof": ("proof", proof),
    "speed": ("speed", speed),
    "summary": ("speed", summary),
    "long-inputs": ("long_inputs", long_inputs),
    "grouping": ("grouping", grouping),
    "attention": ("attention", attention),
    "projection": ("projection", projection),
    "operations": ("operations", operations),
    "training-step": ("training_step", training_step),
    "memory": ("memory", memory),
    "precision": ("precision", precision),
    "export-speed": ("export_speed", export_speed),
    "composition": ("composition", composition),
    "tuning": ("tuning", tuning),
    "rope-places": ("rope_places", rope_places),
    "captioning-speed": ("captioning_speed", captioning_speed),
    "vlm-speed-224": ("vlm_speed_224", vlm_speed),
    "vlm-speed-448": ("vlm_speed_448", vlm_speed),
    "card-deit-tiny": ("norms_deit_tiny_patch16_224", card),
    "card-augreg-tiny": ("norms_vit_tiny_patch16_224", card),
    "norms": ("norms_deit_tiny_patch16_224", norms),
    "norms_augreg": ("norms_vit_tiny_patch16_224", norms),
    "norms_shift": ("norms_deit_tiny_patch16_224", norms_shift),
    "segmentation-flops": ("segmentation_flops", segmentation_flops),
    "segmentation-speed": ("segmentation_speed", segmentation_speed),
}


def render(name: str) -> str:
    """A table as Markdown, with its provenance."""
    source, make_rows = TABLES[name]
    measured = record.load_record(common.RESULTS / f"{source}.json")
    head, *body = make_rows(measured.results)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n_{common.provenance(measured)}_"


def fill(text: str) -> str:
    """Replace what stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    pattern = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda mark: f"{mark[1]}\n{render(mark[2])}\n\n{mark[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a page differs from the records"
    )
    check = parser.parse_args().check
    stale = [page for page in PAGES if fill(page.read_text()) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.name} differs from the records: run python -m benchmarks.tables")
        else:
            page.write_text(fill(page.read_text()))
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
