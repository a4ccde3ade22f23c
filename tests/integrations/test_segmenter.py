"""Merging in a Segmenter: the forward written out by hand, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

import dtem
from contract.hosts import fresh, images, patched
from dtem import ops
from dtem.errors import DtemError
from dtem.models.segmenter import LinearDecoder, Segmenter, plain_encoder

R = 12


def attention(block: nn.Module, h: Tensor, weigh: Tensor | None) -> Tensor:
    attn = block.attn
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in attn.qkv(h).chunk(3, dim=-1))
    logits = q @ k.mT * attn.scale
    if weigh is not None:
        logits = logits + weigh[:, None, None]
    return attn.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


def by_hand(model: Segmenter, x: Tensor, r: int, proportional: bool, embeddings: nn.ModuleList | None = None) -> Tensor:
    """Merge, compute, unmerge, add: block by block, with the host's own layers but none of the adapter's code."""
    tokens = model.embed(x)
    for layer, block in enumerate(model.encoder.blocks):
        for half, norm in enumerate((block.norm1, block.norm2)):
            h = norm(tokens)
            matching = ops.match(h if embeddings is None else embeddings[2 * layer + half](h), r, 1)
            means, counts = [], []
            for image, source in enumerate(matching.source):
                groups = [h[image, source == token] for token in range(h.shape[1] - r)]
                means.append(torch.stack([group.mean(0) for group in groups]))
                counts.append(torch.tensor([float(len(group)) for group in groups]))
            merged, size = torch.stack(means), torch.stack(counts)
            if half:
                y = block.mlp.fc2(torch.nn.functional.gelu(block.mlp.fc1(merged)))
            else:
                y = attention(block, merged, size.log() if proportional else None)
            tokens = tokens + torch.stack([y[image][source] for image, source in enumerate(matching.source)])
    scores = model.decoder(model.encoder.norm(tokens)[:, 1:])
    rows = x.shape[2] // model.patch[0]
    return nn.functional.interpolate(scores.mT.unflatten(2, (rows, -1)), size=x.shape[2:], mode="bilinear")


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("method", ["tome", "dtem"])
@pytest.mark.parametrize("memory", [True, False])
def test_forward_by_hand(method: str, proportional: bool, memory: bool, monkeypatch) -> None:
    monkeypatch.setattr(ops.linear, "serves", lambda x: not memory and x.dtype == torch.float32)
    monkeypatch.setattr(ops.linear, "SMALL", 0)  # with and without the workspace
    model, handle = patched("segmenter", method, R, proportional=proportional)
    x = images("segmenter")
    with torch.no_grad():
        got = model(x)
        expected = by_hand(fresh("segmenter"), x, R, proportional, getattr(handle.method, "embeddings", None))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", [True, False])
def test_blocks_that_merge_nothing_are_the_hosts(memory: bool, monkeypatch) -> None:
    monkeypatch.setattr(ops.linear, "serves", lambda x: not memory and x.dtype == torch.float32)
    monkeypatch.setattr(ops.linear, "SMALL", 0)
    model, handle = patched("segmenter", "tome", [0, 0, 0, 5])
    x = images("segmenter")
    with torch.no_grad():
        merged = model(x)
        handle.r = [0, 0, 0, 0]
        assert not torch.equal(model(x), merged)
        with handle.trace():  # walks through the blocks, though nothing merges
            torch.testing.assert_close(model(x), fresh("segmenter")(x), rtol=1e-5, atol=1e-5)


def test_schedules_of_components_are_resolved_anew_at_every_size() -> None:
    model, handle = patched("segmenter", "tome", 0.25)
    assert handle.plan == (16, 16, 16, 16)
    assert handle.tokens[-1] == 65, "all are back"
    with torch.no_grad(), handle.trace() as trace:
        assert model(torch.randn(1, 3, 48, 40)).shape == (1, 5, 48, 40)  # 120 patches
    assert [len(source.unique()) for source in trace.sources] == [90] * 8, "two components in each of four blocks"
    assert [int(size.sum()) for size in trace.sizes] == [121] * 8


def test_half_of_the_patches_at_most() -> None:
    _, handle = patched("segmenter", "tome", 0.5)
    assert handle.plan == (32,) * 4
    with pytest.raises(DtemError, match="more than half"):
        handle.r = 33


@pytest.mark.parametrize("method", ["evit", "diffrate"])
def test_methods_without_a_dense_form_are_refused(method: str) -> None:
    with pytest.raises(
        DtemError, match=f"'{method}' has no variant for dense prediction; choose one of: algm, dtem, tome"
    ):
        dtem.patch(fresh("segmenter"), method)


def test_what_is_not_a_plain_segmenter_is_refused() -> None:
    class Other(Segmenter):
        pass

    encoder = plain_encoder(32, 2, 4, (16, 16))
    with pytest.raises(DtemError, match="subclass of Segmenter"):
        dtem.patch(Other(encoder, LinearDecoder(32, 3)))
    with pytest.raises(DtemError, match="give a VisionTransformer of timm"):
        Segmenter(nn.Linear(2, 2), LinearDecoder(32, 3))


def test_embeddings_are_saved_and_loaded(tmp_path) -> None:
    model, handle = patched("segmenter", "dtem", 0.4, relaxed=8)
    with torch.no_grad():
        for parameter in handle.method.parameters():
            parameter.add_(torch.randn_like(parameter))
    dtem.save_pretrained(handle, tmp_path / "a.safetensors")
    other = dtem.from_pretrained(tmp_path / "a.safetensors", fresh("segmenter"), r=0.4)
    x = images("segmenter")
    with torch.no_grad():
        assert torch.equal(other.model(x), model(x))
    with pytest.raises(DtemError):
        dtem.from_pretrained(tmp_path / "a.safetensors", fresh("deit"), r=0.4)
