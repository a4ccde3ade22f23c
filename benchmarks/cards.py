"""Write the metadata of the shipped adapters' cards, their accuracy included, from the records in benchmarks/results.

python -m benchmarks.cards            rewrite them
python -m benchmarks.cards --check    exit 1 if they are not in step with the records
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from benchmarks import common
from dtem.adapters import storage
from dtem.adapters.card import card_data
from dtem.measure import record

SHIPPED = Path(storage.__file__).parent / "shipped"
BASE_MODELS = {
    "deit_tiny_patch16_224": "timm/deit_tiny_patch16_224.fb_in1k",
    "vit_tiny_patch16_224": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
}
DATASET = "imagenet-1k"
SHOWN_R = (8, 13, 16)
FRONT = re.compile(r"\A---\n.*?\n---\n\n?", re.S)


def results(rows: list[dict[str, Any]]) -> list[EvalResult]:
    """The rows of the whole adapter, embeddings and norms, beside the unmerged model and ToMe."""
    by_place = {(row["variant"], row["r"]): row for row in rows if "kl" in row}
    listed = []
    for r in SHOWN_R:
        row, tome, unmerged = by_place["both", r], by_place["tome", r], by_place["unmerged", 0]
        for kind, title, key in (
            ("accuracy", "top-1 accuracy (%)", "top1"),
            ("cross_entropy", "cross-entropy", "cross_entropy"),
        ):
            gain = dict(zip(("value", "low", "high"), (round(number, 4) for number in row[f"{key}_gain"]), strict=True))
            beside = {"unmerged": round(unmerged[key], 4), "tome": round(tome[key], 4)}
            listed.append(
                EvalResult(
                    task_type="image-classification",
                    dataset_type=DATASET,
                    dataset_name="ImageNet-1k, validation photographs, 1 per class",
                    metric_type=kind,
                    metric_name=f"{title}, r = {r}",
                    metric_value=round(row[key], 4),
                    metric_args={"r": str(r), "images": row["images"], **beside, "difference_from_tome": gain},
                )
            )
    return listed


def with_metadata(name: str, text: str) -> str:
    """The card with its metadata drawn anew."""
    header, _ = storage.read(SHIPPED / f"{name}.safetensors")
    rows = record.load_record(common.RESULTS / f"norms_{name}.json").results
    data = card_data(header, name, BASE_MODELS[name], license="apache-2.0", datasets=[DATASET], results=results(rows))
    return f"---\n{data.to_yaml()}\n---\n\n{FRONT.sub('', text)}"


def main(argv: list[str] | None = None) -> int:
    """Write or check the cards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    for name in BASE_MODELS:
        path = SHIPPED / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        written = with_metadata(name, text)
        if args.check and written != text:
            print(f"{path.name} is not in step with its record: run python -m benchmarks.cards")
            return 1
        path.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
