"""Tables of the record `frozen`: methods beside a frozen host, what norms bring, and terms of DTEM's similarity."""

from typing import Any

from dtem.measure.statistics import Difference

DIGITS = {"top1": 1, "cross_entropy": 3, "kl": 4}
LABELS = {
    "tome": "ToMe",
    "mctf": "MCTF",
    "pitome": "PiToMe",
    "ppt": "PPT",
    "ppt in every block": "PPT in every block",
    "evit": "EViT",
    "etps": "eTPS",
    "dtps": "dTPS",
    "bat": "BAT",
    "evo_vit": "Evo-ViT",
    "token_pooling": "Token Pooling",
    "dynamicvit": "DynamicViT",
    "diffrate": "DiffRate",
    "dtem": "DTEM, embeddings",
    "dtem trained alike": "DTEM trained alike, embeddings",
}


def frozen(results: dict[str, Any]) -> list[list[str]]:
    """Methods beside a frozen host at equal GFLOPs, paired with ToMe; at every budget the lowest KL first."""
    head = ["r of ToMe", "", "GFLOPs", "top-1 %", "against ToMe (95 %)", "cross-entropy", "against ToMe (95 %)", "KL"]
    table = [head]
    rows = [row for row in results["rows"] if not _is_term(row)]
    for row in sorted(rows, key=lambda row: (row["r"], row["kl"])):
        gains = row.get("against_tome", {})
        table.append(
            [
                str(row["r"]),
                _label(row["variant"]),
                f"{row['macs'] / 1e9:.3f}",
                f"{row['top1']:.1f}",
                _interval(gains.get("top1"), 1),
                f"{row['cross_entropy']:.3f}",
                _interval(gains.get("cross_entropy"), 3),
                f"{row['kl']:.4f}",
            ]
        )
    return table


def norms(results: dict[str, Any]) -> list[list[str]]:
    """What norms of its own bring each method: KL without and with them, at every budget."""
    rows = {(row["variant"], row["r"]): row for row in results["rows"]}
    rates = sorted({r for _, r in rows if r})
    with_norms = [name for name, r in rows if r == rates[-1] and name.endswith(" + norms")]
    table = [["KL, and its change by norms (95 %)", *(text for r in rates for text in (f"r = {r}", "by norms"))]]
    for name in with_norms:
        cells = [_label(name.removesuffix(" + norms"))]
        for r in rates:
            row = rows.get((name, r))
            base = row and rows.get((str(row["base"]), r))
            change = row["against_base"]["kl"] if row and base else None
            cells += [f"{base['kl']:.4f}" if base else "", _interval(change, 4)]
        table.append(cells)
    return table


def _label(variant: str) -> str:
    plain, plus, _ = variant.partition(" + norms")
    return LABELS.get(plain, plain) + plus


def _is_term(row: dict[str, Any]) -> bool:
    return row["variant"].startswith("dtem + norms + ")


def terms(results: dict[str, Any]) -> list[list[str]]:
    """Rivals' ideas as terms of DTEM's similarity, against the shipped adapter as it is."""
    table = [
        ["added to the shipped adapter", "GFLOPs", "top-1 %", "points (95 %)", "cross-entropy (95 %)", "KL (95 %)"]
    ]
    rows = [row for row in results["rows"] if _is_term(row)]
    r = max(row["r"] for row in rows)
    (own,) = (row for row in results["rows"] if (row["variant"], row["r"]) == ("dtem + norms", r))
    table.append(["nothing", f"{own['macs'] / 1e9:.3f}", f"{own['top1']:.1f}", "", f"{own['cross_entropy']:.3f}"])
    table[-1].append(f"{own['kl']:.4f}")
    for row in rows:
        change = [_interval(row["against_base"][name], digits) for name, digits in DIGITS.items()]
        name = row["variant"].removeprefix("dtem + norms + ")
        table.append([name, f"{row['macs'] / 1e9:.3f}", f"{row['top1']:.1f}", *change])
    return table


def _interval(values: list[float] | None, digits: int) -> str:
    return "" if values is None else Difference(*values).text(digits)
