"""GFLOPs of Seg-S-Mask/16 against the paper's table."""

import csv
from pathlib import Path

import pytest
import torch

import dtem
from dtem.measure import flops
from dtem.models import segmenter

TABLE = Path(__file__).resolve().parent.parent / "data" / "paper" / "segmentation.csv"
ROWS = list(csv.DictReader(line for line in TABLE.read_text().splitlines() if not line.startswith("#")))
SIDE, WIDTH, CLASSES = 512, 384, 150


@pytest.fixture(scope="module")
def model() -> segmenter.Segmenter:
    with torch.device("meta"):
        return segmenter.create("seg_s_mask_16", CLASSES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['method']}-{row['ratio']}")
def test_gflops_are_the_papers(row: dict[str, str], model: segmenter.Segmenter) -> None:
    """The paper counts MACs, but for QKᵀ and AV in the decoder's two blocks."""
    left_out = 2 * 2 * ((SIDE // 16) ** 2 + CLASSES) ** 2 * WIDTH
    method, ratio = row["method"].lower(), float(row["ratio"])
    if method == "none":
        count = flops.count(model, (3, SIDE, SIDE))
    else:
        handle = dtem.patch(model, method, r=ratio)
        count = flops.count(model, (3, SIDE, SIDE))
        handle.unpatch()
    assert count.macs - count.paper == left_out
    assert count.paper / 1e9 == pytest.approx(float(row["gflops"]), rel=0.01)


def test_a_linear_decoder_has_no_attention() -> None:
    with torch.device("meta"):
        model = segmenter.create("seg_t_linear_16", CLASSES)
    count = flops.count(model, (3, 100, 72))
    assert count.paper == count.macs


def test_sides_are_rounded_up_to_whole_patches() -> None:
    with torch.device("meta"):
        model = segmenter.create("seg_t_mask_16", 11)
    assert flops.count(model, (3, 100, 72)) == flops.count(model, (3, 112, 80))


def test_the_table_is_there() -> None:
    assert {(row["method"], row["ratio"]) for row in ROWS} >= {("none", "0"), ("ToMe", "0.5"), ("DTEM", "0.5")}
    assert len(ROWS) == 9
