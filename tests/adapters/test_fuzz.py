"""Damaged adapter files: every error is a DtemError, the model stays as it was, and changed tensors are noticed."""

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import dtem
from dtem.adapters import storage

Place = tuple[str | int, ...]
VALUES: list[Any] = [None, True, 0, -1, 7, 10**30, 0.5, 1e308, float("nan"), "", "x", "8", [], [1], [[]], {}, {"a": 1}]
"""Of every JSON type."""
MISSING = object()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
THOROUGH = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


def tiny() -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **shape).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "good.safetensors"
    notes = {"trained_on": '["a.jpg"]', "data": "photographs"}
    dtem.save_pretrained(dtem.patch(tiny(), r=4, hidden=(8, 4), init="random"), path, trained_r=8, notes=notes)
    return path


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["dtem"])


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every place of a JSON document."""
    yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*place, key))


def replaced(document: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    document = copy.deepcopy(document)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    if value is MISSING:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return document


def load(path: Path, model: nn.Module) -> str | None:
    """The message of the error; None if the file loads. Other errors than DtemError are raised."""
    message = None
    try:
        dtem.from_pretrained(path, model).unpatch()
    except dtem.DtemError as error:
        message = str(error)
    assert not hasattr(model, "dtem")
    for use in (lambda: storage.trained_on(storage.read(path)[0]), lambda: mean_of(path)):
        with contextlib.suppress(dtem.DtemError):
            use()
    return message


def mean_of(path: Path) -> None:
    dtem.average_adapters([path, path], path.with_name("mean.safetensors"))


def with_header(good: Path, document: Any) -> Path:
    path = good.with_name("changed.safetensors")
    save_file(load_file(good), path, {"dtem": json.dumps(document)})
    return path


def with_bytes(good: Path, content: bytes) -> Path:
    path = good.with_name("changed.safetensors")
    path.write_bytes(content)
    return path


def test_every_field_of_every_type(good: Path, model: nn.Module) -> None:
    document = header(good)
    for place in places(document):
        original = functools.reduce(lambda value, key: value[key], place, document)
        for value in [*VALUES, MISSING] if place else VALUES:
            message = load(with_header(good, replaced(document, place, value)), model)
            if message is not None and place and original is not None and type(value) not in (type(original), object):
                named = [key for key in place if isinstance(key, str)][-1]
                assert named in message, (place, value, message)


def check_header(good: Path, model: nn.Module, data: st.DataObject) -> None:
    document = header(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(document))))
        document = replaced(document, place, data.draw(JSON))
    event("refused" if load(with_header(good, document), model) else "loads")


def check_bytes(good: Path, model: nn.Module, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    where = data.draw(st.sampled_from(["tensors", "header", "anywhere"]))
    low, high = {"tensors": (start, len(content)), "header": (0, start), "anywhere": (0, len(content))}[where]
    changes = data.draw(st.dictionaries(st.integers(low, high - 1), st.integers(1, 255), min_size=1, max_size=4))
    for place, change in changes.items():
        content[place] ^= change
    message = load(with_bytes(good, bytes(content)), model)
    event(f"{where}: {'noticed' if message else 'not noticed'}")
    assert message is not None or max(changes) < start, "changed tensors must be noticed"


def check_length(good: Path, model: nn.Module, data: st.DataObject) -> None:
    content = good.read_bytes()
    end = data.draw(st.integers(0, len(content)))
    content = content[:end] + data.draw(st.binary(max_size=64))
    message = load(with_bytes(good, content), model)
    assert message is not None or content == good.read_bytes()


CHECKS = [check_header, check_bytes, check_length]


@pytest.mark.parametrize("check", CHECKS)
def test_damaged_files(check: Any, good: Path, model: nn.Module) -> None:
    QUICK(given(st.data())(lambda data: check(good, model, data)))()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("check", CHECKS)
def test_thousands_of_damaged_files(check: Any, good: Path, model: nn.Module) -> None:
    THOROUGH(given(st.data())(lambda data: check(good, model, data)))()
