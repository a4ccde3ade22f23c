"""GFLOPs of LV-ViT-S and of AugReg ViT-S at 384×384, against every row that the paper prints."""

import csv
import functools
from pathlib import Path

import pytest
import timm
import torch

import dtem
import dtem.models
from dtem.measure import flops
from dtem.methods.evit import keep_rate

PAPER = Path(__file__).resolve().parent.parent / "data" / "paper"
NAMES = {"LV-ViT-S": "lvvit_s", "AugReg-ViT-S-384": "vit_small_patch16_384"}
WITHIN = {"LV-ViT-S": 0.02, "AugReg-ViT-S-384": 0.01}

with (PAPER / "lvvit_augreg.csv").open(newline="") as file:
    TABLE = list(csv.DictReader(line for line in file if not line.startswith("#")))


@functools.cache
def handle(model: str, method: str) -> dtem.Handle:
    with torch.device("meta"):
        return dtem.patch(timm.create_model(NAMES[model]), method)


def rate(row: dict[str, str]) -> object:
    """The r behind a row. For LV-ViT-S the paper prints none: r = 14 in its first 12 blocks, and half of the patches
    kept by the others in the 5th, 9th and 13th block, as EViT has it for a host of 16 blocks."""
    if row["r"]:
        return int(row["r"])
    return (
        14 if row["method"] in ("ToMe", "DTEM") else keep_rate(0.5, 196, 16, (4, 8, 12), fuse=row["method"] == "EViT")
    )


def test_the_table_is_whole() -> None:
    assert [row["model"] for row in TABLE].count("LV-ViT-S") == 5
    assert len(TABLE) == 8


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['method']}")
def test_every_gflops_value(row: dict[str, str]) -> None:
    patched = handle(row["model"], "tome" if row["method"] == "none" else row["method"].lower())
    patched.r = rate(row)
    counted, printed = flops.count(patched.model, patched.host.image).paper / 1e9, float(row["gflops"])
    assert counted == pytest.approx(printed, rel=WITHIN[row["model"]])


def test_lv_vit_costs_what_its_parts_cost() -> None:
    """By hand, in MACs: 4 convolutions, 16 blocks of 197 tokens, the class token's head and the patches'."""
    stem = 112 * 112 * 64 * (3 * 49 + 2 * 64 * 9) + 196 * 64 * 64 * 384
    block = 197 * 384 * (3 * 384 + 384 + 2 * 3 * 384) + 2 * 197 * 197 * 384
    patched = handle("LV-ViT-S", "tome")
    patched.r = 0
    assert flops.count(patched.model, (3, 224, 224)).macs == stem + 16 * block + 197 * 384 * 1000
