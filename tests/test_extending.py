"""The worked example of docs/extending.md, as it stands there."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

import dtem
from dtem import adapters

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture
def example(monkeypatch):
    """The page's model and adapter as a module; what it registers is gone afterwards."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = [block for block in code if "MyViT" in block]
    for registry in (adapters.ADAPTERS, adapters.ORIGINS):
        monkeypatch.setitem(registry, "mine", "")
    module = types.ModuleType("docs_extending")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    exec(compile(code[0], str(PAGE), "exec"), module.__dict__)
    module.__dict__["usage"] = code[1]
    return module


def test_the_example_merges(example):
    exec(compile(example.usage, str(PAGE), "exec"), example.__dict__)
    handle, model = example.handle, example.model
    assert example.logits.shape == (2, 5)
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


def test_the_example_is_tome_until_it_is_trained_and_can_be_trained(example):
    x, answers = torch.randn(2, 3, 32, 32), {}
    for method in ("dtem", "tome"):
        torch.manual_seed(1)
        model = example.MyViT().eval()
        dtem.patch(model, method, r=8)
        with torch.no_grad():
            answers[method] = model(x)
    torch.testing.assert_close(answers["dtem"], answers["tome"], rtol=1e-4, atol=1e-5)
    handle = dtem.patch(example.MyViT(), r=8)
    handle.mode = "soft"
    handle.model(x).square().sum().backward()
    assert all(part.grad is not None and part.grad.abs().max() > 0 for part in handle.method.parameters())
