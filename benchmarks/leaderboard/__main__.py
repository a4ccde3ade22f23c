"""Check the entries of the leaderboard, and write its CSV and its page.

python -m benchmarks.leaderboard                     check all entries, write leaderboard.csv and index.html
python -m benchmarks.leaderboard --check             write nothing; exit 1 if the two differ from the entries
python -m benchmarks.leaderboard --add frozen        first write an entry for every row of that record
python -m benchmarks.leaderboard --add mine --photographs "ImageNet validation, …" --training "100 updates of …"
"""

import argparse
import csv
import io
import re
import sys

import yaml

from benchmarks import common
from benchmarks.leaderboard import ENTRIES, FOLDER, Entry, groups, numbers_of, on_front, read_all
from dtem.errors import DtemError
from dtem.files import write_file
from dtem.measure import record
from dtem.visualise.html_page import Page

_FIRST = ("kind", "model", "method", "variant", "rate", "gflops", "convention", "top1", "low", "high")
COLUMNS = (*_FIRST, "images", "data", "training", "hardware")
SOURCES = {
    "frozen": "beside a frozen host, without labels, on 4,000 photographs",
    "rivals": "200 updates of 32 of 4,000 photographs, with labels",
}
"""Records of this package with rows for the leaderboard, and how what they name was trained."""
PHOTOGRAPHS = "ImageNet validation, 1,000 photographs, one per class"
"""Of those records."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", metavar="RECORD", help="a name in benchmarks/results")
    parser.add_argument("--photographs", metavar="TEXT", help="which ones a record was made on")
    parser.add_argument("--training", metavar="TEXT", help="what was trained for it, on what; default: nothing")
    args = parser.parse_args()
    if args.add:
        photographs = args.photographs or (PHOTOGRAPHS if args.add in SOURCES else None)
        if photographs is None:
            raise DtemError(f"--add {args.add}: say with --photographs which ones the record was made on")
        add(args.add, photographs, args.training)
    entries = read_all()
    drawn = {"leaderboard.csv": as_csv(entries), "index.html": as_page(entries)}
    stale = [name for name, text in drawn.items() if not _is(name, text)]
    if not args.check:
        for name in stale:
            write_file(FOLDER / name, drawn[name])
    print(f"{len(entries)} entries; {'not in step' if args.check else 'written'}: {', '.join(stale) or 'none'}")
    return int(args.check and bool(stale))


def _is(name: str, text: str) -> bool:
    file = FOLDER / name
    return file.exists() and file.read_text(encoding="utf-8") == text


def add(name: str, photographs: str, training: str | None = None) -> None:
    """An entry for every row of a record."""
    measured = record.load_record(common.RESULTS / f"{name}.json")
    for row in measured.results["rows"]:
        variant = row.get("variant", row["method"])
        by = "variant" if "variant" in row else "method"
        learned = row.get("learned", "nothing")
        content = {
            "kind": "measured",
            "method": row.get("name", row["method"]),
            "variant": variant,
            "rate": "/".join(map(str, row["plan"])) if "plan" in row else str(row["r"]),
            "convention": "macs",
            "data": photographs,
            "training": training or ("none" if learned == "nothing" else f"{learned}: {SOURCES.get(name, name)}"),
            "record": name,
            "row": {by: row[by], "r": row["r"]},
            **numbers_of(measured, row, "macs"),
        }
        content["interval"] = list(content["interval"])
        file = re.sub(r"[^\w.]+", "-", f"{name}-{variant}-{row['r']}") + ".yaml"
        write_file(ENTRIES / file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def as_csv(entries: list[Entry]) -> str:
    """All entries, with every field; `front` says which are on the front of their group."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, "front", "source"])
    for group in groups(entries).values():
        for entry in group:
            low, high = entry.interval or ("", "")
            values = {**vars(entry), "low": low, "high": high}
            writer.writerow([*(values[name] for name in COLUMNS), on_front(entry, group), source(entry)])
    return out.getvalue()


def source(entry: Entry) -> str:
    """Where the numbers come from."""
    return f"benchmarks/results/{entry.record}.json" if entry.record else str(entry.reference)


def as_page(entries: list[Entry]) -> str:
    """One table per group. Measured and quoted entries are never in the same one."""
    page = Page("Token reduction: leaderboard")
    page.text(
        "Accuracy and operations of token-reduction methods, one table per model. A star marks entries that no other "
        "one of their table beats: none is at least as accurate for at most as many GFLOPs.",
        "Measured: run by this package, with its record, all on the same photographs. The interval is that of the "
        "accuracy; differences between methods are paired and have narrower ones (docs/research/methods.md).",
        "Quoted: printed by a publication, on all 50,000 photographs of ImageNet's validation set; not run here.",
    )
    for (model, kind, data, convention), group in groups(entries).items():
        counted = {"macs": "multiply-adds", "paper": "as in DTEM's paper"}[convention]
        hardware = ", ".join(dict.fromkeys(entry.hardware for entry in group))
        page.heading(f"{model}: {kind}")
        page.text(f"{data}. GFLOPs: {counted}. {'Run on' if kind == 'measured' else 'Hardware:'} {hardware}.")
        page.table(
            ("variant", "GFLOPs", "top-1 %", "95 %", "", "trained", "source"),
            [
                (
                    entry.variant,
                    f"{entry.gflops:g}" if kind == "quoted" else f"{entry.gflops:.3f}",
                    f"{entry.top1:g}" if kind == "quoted" else f"{entry.top1:.1f}",
                    "" if entry.interval is None else "{:.1f} – {:.1f}".format(*entry.interval),
                    "★" if on_front(entry, group) else "",
                    entry.training.partition(":")[0],
                    source(entry),
                )
                for entry in group
            ],
        )
    return page.html()


if __name__ == "__main__":
    sys.exit(common.run(main))
