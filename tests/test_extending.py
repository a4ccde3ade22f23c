"""Extending dtem: the examples of docs/extending.md as they are printed there, registration, and entry points."""

import importlib.metadata
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import dtem
from contract.hosts import fresh, images
from dtem import registry
from dtem.errors import DtemError
from dtem.integrations import INTEGRATIONS
from dtem.methods import DENSE_METHODS, METHODS, Method
from dtem.methods.tome import Tome
from dtem.registry import Registry

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    """Registrations of a test end with it."""
    for each in (METHODS, DENSE_METHODS, INTEGRATIONS):
        monkeypatch.setattr(each, "_classes", dict(each._classes))


@pytest.fixture
def page(monkeypatch):
    """The page's code, run block by block, as a module."""
    module = types.ModuleType("docs_extending")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


def test_the_pages_model_merges(page):
    handle, model = page.handle, page.model
    assert page.logits.shape == (2, 5)
    assert handle.tokens == (56, 48, 40, 32)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        merged = model(x)
        with handle.trace() as trace:
            model(x)
        handle.r = 0
        unmerged = model(x)
        handle.unpatch()
        assert torch.equal(unmerged, model(x))
    assert not torch.allclose(merged, unmerged)
    assert torch.equal(trace.sizes[-1].sum(dim=1), torch.full((2,), 64.0))


def test_the_pages_model_is_tome_until_it_is_trained_and_can_be_trained(page):
    x, logits = torch.randn(2, 3, 32, 32), {}
    for method in ("dtem", "tome", "features"):
        torch.manual_seed(1)
        model = page.MyViT().eval()
        dtem.patch(model, method, r=8)
        with torch.no_grad():
            logits[method] = model(x)
    torch.testing.assert_close(logits["dtem"], logits["tome"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits["features"], logits["tome"])
    handle = dtem.patch(page.MyViT(), r=8)
    handle.mode = "soft"
    handle.model(x).square().sum().backward()
    assert all(part.grad is not None and part.grad.abs().max() > 0 for part in handle.parameters())


class Keys(Tome):
    name = "keys"


def test_a_method_is_registered_by_a_call_or_as_a_decorator():
    assert dtem.register_method(Keys) is Keys
    assert "keys" in dtem.list_methods()
    assert type(dtem.patch(fresh("deit"), "keys", r=4).method) is Keys

    @dtem.register_method(dense=True)
    class DenseKeys(Method):
        name = "keys"

    assert DENSE_METHODS["keys"] is DenseKeys


def test_registering_again_is_refused_unless_it_is_the_same_class():
    dtem.register_method(Keys)
    dtem.register_method(Keys)
    with pytest.raises(DtemError, match=r"method 'keys' is registered already; choose another name"):
        dtem.register_method(type("Keys", (Tome,), {"name": "keys", "__module__": "elsewhere"}))
    with pytest.raises(DtemError, match="method 'tome' is registered already"):
        dtem.register_method(type("Mine", (Tome,), {"name": "tome"}))
    with pytest.raises(DtemError, match="host family 'timm_vit' is registered already"):
        dtem.register_integration(type("Mine", (), {"family": "timm_vit"}))


def test_an_integration_may_not_take_models_of_others(page):
    with pytest.raises(DtemError, match=r"not supported.*MyViT"):
        dtem.patch(torch.nn.Linear(2, 2))
    assert dtem.patch(fresh("deit"), r=4).merger.family == "timm_vit"


@pytest.fixture
def entry_points(monkeypatch):
    """Stands for installed packages: entry points by group."""
    points: dict[str, list[importlib.metadata.EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))
    for each in (METHODS, INTEGRATIONS):
        monkeypatch.setattr(each, "_discovered", False)

    def add(group, name, value):
        points.setdefault(group, []).append(importlib.metadata.EntryPoint(name, value, group))

    return add


def test_entry_points_are_registered_and_imported_on_first_use(entry_points, monkeypatch):
    package = types.ModuleType("their_package")
    package.Keys = Keys
    entry_points("dtem.methods", "keys", "their_package:Keys")
    assert "keys" in dtem.list_methods()
    monkeypatch.setitem(sys.modules, "their_package", package)
    model = fresh("deit")
    handle = dtem.patch(model, "keys", r=4)
    with torch.no_grad():
        merged = model(images("deit"))
        handle.unpatch()
        dtem.patch(model, "tome", r=4)
        assert torch.equal(model(images("deit")), merged)


def test_an_entry_point_of_an_integration(entry_points, page, monkeypatch):
    monkeypatch.setattr(INTEGRATIONS, "_classes", {k: v for k, v in INTEGRATIONS._classes.items() if k != "mine"})
    with pytest.raises(DtemError, match="MyViT is not supported"):
        dtem.patch(page.MyViT())
    monkeypatch.setattr(INTEGRATIONS, "_discovered", False)
    entry_points("dtem.integrations", "mine", "docs_extending:MyIntegration")
    assert dtem.patch(page.MyViT(), r=8).tokens[-1] == 32


@pytest.mark.parametrize(("name", "first"), [("tome", None), ("theirs", "one:A")])
def test_entry_points_with_a_name_in_use_are_refused(entry_points, name, first):
    if first is not None:
        entry_points("dtem.methods", name, first)
    entry_points("dtem.methods", name, "another:Method")
    for _ in range(2):
        with pytest.raises(DtemError, match=f"'{name}' is registered already.*'another:Method'.*rename"):
            dtem.list_methods()


def test_a_class_may_be_registered_by_its_entry_point_and_its_decorator(entry_points):
    entry_points("dtem.methods", "keys", f"{Keys.__module__}:Keys")
    dtem.register_method(Keys)
    assert METHODS["keys"] is Keys


def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(DtemError, match="thing 'x' is not known; choose one of: a, b"):
        Registry("thing", {"b": "m:B", "a": "m:A"}, "dtem.nothing")["x"]
