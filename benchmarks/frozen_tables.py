"""Tables of the record `frozen`: methods beside a frozen host, and terms of DTEM's similarity."""

from typing import Any

from dtem.measure.statistics import Difference

DIGITS = {"top1": 1, "cross_entropy": 3, "kl": 4}
LABELS = {
    "tome": "ToMe",
    "mctf": "MCTF",
    "pitome": "PiToMe",
    "ppt": "PPT",
    "evit": "EViT",
    "dtem": "DTEM, embeddings",
    "ppt in every block": "PPT in every block",
}


def frozen(results: dict[str, Any]) -> list[list[str]]:
    """Methods beside a frozen host at equal GFLOPs, paired with ToMe; and what their norms bring."""
    head = ["r of ToMe", "", "GFLOPs", "top-1 %", "against ToMe (95 %)", "cross-entropy", "against ToMe (95 %)", "KL"]
    table = [[*head, "KL by its norms (95 %)"]]
    rows = [row for row in results["rows"] if not _is_term(row)]
    for row in sorted(rows, key=lambda row: row["r"]):
        plain, plus, _ = row["variant"].partition(" + norms")
        gains = row.get("against_tome", {})
        base = row.get("against_base", {})
        table.append(
            [
                str(row["r"]),
                LABELS.get(plain, plain) + plus,
                f"{row['macs'] / 1e9:.3f}",
                f"{row['top1']:.1f}",
                _interval(gains.get("top1"), 1),
                f"{row['cross_entropy']:.3f}",
                _interval(gains.get("cross_entropy"), 3),
                f"{row['kl']:.4f}",
                _interval(base.get("kl"), 4) if plus else "",
            ]
        )
    return table


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
