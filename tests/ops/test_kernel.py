"""The compiled kernel of matching and merging: the same as the operations of torch, or not used."""

from pathlib import Path

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import dtem
from dtem import ops
from dtem.ops import kernel

needs_kernel = pytest.mark.skipif(kernel.library() is None, reason="no kernel: no Linux, or no C++ compiler")


def by_torch(metric: torch.Tensor, r: int, prefix: int, monkeypatch: pytest.MonkeyPatch) -> ops.Matching:
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "serves", lambda *_, **__: False)
        return ops.match(metric, r, prefix)


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_matching_is_the_loop(data: st.DataObject) -> None:
    """Vectors of ±1 and 0 have exact products and so ties, which go to the lower index."""
    prefix, patches = data.draw(st.integers(0, 6)), data.draw(st.integers(2, 90))
    r, width = data.draw(st.integers(0, patches // 2)), data.draw(st.sampled_from([4, 16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    metric = torch.randint(0, 2, (2, prefix + patches, width), generator=generator).float() * 2 - 1
    matching = ops.Matching(*kernel.match(metric, r, prefix))
    for image in range(2):
        kept, merged, partner = oracles.match(metric[image], r, prefix)
        assert matching.kept[image].tolist() == kept
        assert matching.merged[image].tolist() == merged
        assert matching.kept[image][matching.into[image]].tolist() == partner


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("batch", "tokens", "width", "r", "prefix"), [(1, 197, 64, 16, 1), (5, 101, 48, 30, 2)])
def test_it_is_what_torch_computes(
    batch: int, tokens: int, width: int, r: int, prefix: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        metric, x = torch.randn(batch, tokens, width), torch.randn(batch, tokens, 40)
        matching, expected = ops.match(metric, r, prefix), by_torch(metric, r, prefix, monkeypatch)
        for name in ("kept", "merged", "into"):
            assert torch.equal(getattr(matching, name), getattr(expected, name))
        for size in (None, torch.randint(1, 9, (batch, tokens)).float()):
            merged = ops.merge(x, size, matching)
            with monkeypatch.context() as patch:
                patch.setattr(kernel, "serves", lambda *_, **__: False)
                reference = ops.merge(x, size, matching)
            for both in (merged, ops.match_and_merge(x, size, metric, r, prefix)):
                assert torch.equal(both[0], reference[0])
                assert torch.equal(both[1], reference[1])
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_that_receives_many_adds_them_in_the_order_of_torch(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, tokens, r = torch.get_num_threads(), 401, 150
    torch.set_num_threads(threads)
    try:
        x, size = torch.randn(1, tokens, 192), torch.rand(1, tokens) * 9 + 1
        matching = ops.match(torch.randn(1, tokens, 8), r, 1)
        into = torch.randint(tokens - r - 20, tokens - r, (1, r))  # 20 tokens receive all of them
        matching = ops.Matching(matching.kept, matching.merged, into)
        merged = ops.merge(x, size, matching)
        monkeypatch.setattr(kernel, "serves", lambda *_, **__: False)
        reference = ops.merge(x, size, matching)
        assert torch.equal(merged[0], reference[0])
        assert torch.equal(merged[1], reference[1])
    finally:
        torch.set_num_threads(before)


def test_matching_and_merging_at_once_refuse_an_impossible_r() -> None:
    x = torch.randn(1, 9, 4)
    for r in (-1, 5):
        with pytest.raises(dtem.DtemError, match=f"r = {r} "):
            ops.match_and_merge(x, None, x, r, 1)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_matched_by_the_kernel_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torch.randn(2, 101, 16).to(dtype)
    expected = by_torch(metric, 20, 1, monkeypatch)
    monkeypatch.setattr(ops.matching, "strongest", lambda *_: pytest.fail("matched by torch"))
    matching = ops.match(metric, 20, 1)
    for name in ("kept", "merged", "into"):
        assert torch.equal(getattr(matching, name), getattr(expected, name))


@needs_kernel
def test_views_and_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torch.randn(2, 8, 60).transpose(1, 2)[:, 3:]
    for name in ("kept", "merged", "into"):
        assert torch.equal(getattr(ops.match(metric, 9, 1), name), getattr(by_torch(metric, 9, 1, monkeypatch), name))
    matching = ops.match(torch.full((1, 21, 4), torch.nan), 5, 1)
    assert sorted(matching.kept[0].tolist() + matching.merged[0].tolist()) == list(range(21))
    assert int(matching.into.max()) < 16
    assert ops.match(torch.zeros(1, 9, 4), 2, 1).merged.tolist() == [[2, 4]]


@needs_kernel
def test_it_serves_plain_inference_alone() -> None:
    x = torch.randn(1, 9, 4)
    assert kernel.serves(x)
    assert not kernel.serves(x.double())
    assert not kernel.serves(x.bfloat16())
    assert not kernel.serves(x.to("meta"))
    assert not kernel.serves(torch.nn.Parameter(x))
    trained = x.clone().requires_grad_()
    assert not kernel.serves(trained)
    with torch.no_grad():
        assert kernel.serves(trained)
    with FlopCounterMode(display=False):
        assert not kernel.serves(x)
    served = torch.vmap(lambda z: torch.tensor(kernel.serves(z)), out_dims=None)(x)
    assert not served


def test_long_inputs_are_matched_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torch.randn(2, 45, 8, dtype=torch.float64)
    whole = ops.match(metric, 11, 1)
    monkeypatch.setattr(ops.matching, "SIMILARITIES", 100)
    for name in ("kept", "merged", "into"):
        assert torch.equal(getattr(ops.match(metric, 11, 1), name), getattr(whole, name))


@pytest.mark.parametrize("case", ["off", "no compiler", "broken compiler", "shared folder", "no folder"])
def test_without_a_compiler_there_is_no_kernel(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dtem" / "kernels"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if case == "off":
        monkeypatch.setenv("DTEM_KERNEL", "0")
    elif case == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("CXX", "")
    elif case == "broken compiler":
        compiler = tmp_path / "broken"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
    elif case == "shared folder":  # code is not loaded from where others can write
        folder.chmod(0o777)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        (tmp_path / "file").write_text("no folder")
    assert kernel.library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


@needs_kernel
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel.library.__wrapped__() is not None
    (compiled,) = tmp_path.rglob("*.so")
    assert compiled.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(kernel.subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert kernel.library.__wrapped__() is not None


def test_without_a_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "library", lambda: None)
    assert ops.match(torch.ones(1, 9, 4), 2, 1).merged.tolist() == [[2, 4]]
