"""ATS against the method written out token by token, with lists of different length instead of padding."""

import math

import pytest
import torch

import dtem
from contract.hosts import fresh, gradients, images, lively, patched, vit
from dtem.methods.ats import every_block


def drawn(scores, samples, ascending):
    """Which of `scores` (a list) the quantiles fall on, with loops."""
    order = sorted(range(len(scores)), key=lambda i: scores[i]) if ascending else list(range(len(scores)))
    total, hit = sum(scores), set()
    for sample in range(samples):
        reached = 0.0
        for index in order:
            reached += scores[index] / total
            if reached >= (2 * sample + 1) / (2 * samples):
                hit.add(index)
                break
    return sorted(hit)


def written_out(model, image, plan, ascending=True):
    """Scores of one image, and which patch each of its tokens is at the end (prefix tokens: None)."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    patch = [None] * prefix + list(range(len(states) - prefix))
    samples = len(states) - prefix
    for block, r in zip(model.blocks, plan, strict=True):
        attn = block.attn
        count, width = len(states), attn.head_dim
        qkv = torch.stack([attn.qkv(block.norm1(state)) for state in states]).view(count, 3, attn.num_heads, width)
        heads, scores = [], [0.0] * count
        for head in range(attn.num_heads):
            q, k, v = attn.q_norm(qkv[:, 0, head]), attn.k_norm(qkv[:, 1, head]), qkv[:, 2, head]
            matrix = (q @ k.T / math.sqrt(width)).softmax(dim=1)
            heads.append(matrix @ v)
            for token in range(count):
                scores[token] += (matrix[0, token] * v[token].square().sum().sqrt()).item()
        update = attn.proj(attn.norm(torch.cat(heads, dim=1)))
        states = [state + block.ls1(change) for state, change in zip(states, update, strict=True)]
        if r:
            samples -= r
            stay = [*range(prefix), *(prefix + i for i in drawn(scores[prefix:], samples, ascending))]
            states, patch = [states[i] for i in stay], [patch[i] for i in stay]
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    states = [model.norm(state) for state in states]
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2, patch
    patches = torch.stack(states[prefix:])
    if model.attn_pool is not None:
        pooled = model.attn_pool(patches[None])[0]
    else:
        mean, top = patches.mean(dim=0), patches.amax(dim=0)
        pooled = {"token": states[0], "avg": mean, "max": top, "avgmax": 0.5 * (mean + top)}[model.global_pool]
    return model.head(model.fc_norm(pooled)), patch


def mapped():
    """Attention pooling beside a class token: nothing of the padding may be looked at."""
    return lively(vit(global_pool="map", fc_norm=False)()).eval()


HOSTS = ["deit", "distilled", "mae", "dinov2_registers", "qk_norm", "max", "avgmax", "mapped"]


def ready(name, r, **options):
    """The patched model, its handle, and the host as it was; all in float64."""
    if name == "mapped":
        torch.manual_seed(3)
        host = mapped().double()
        handle = dtem.patch(mapped_copy(host), "ats", r, **options)
        return handle.model, handle, host
    model, handle = patched(name, "ats", r, **options)
    return model.double(), handle, fresh(name).double()


def mapped_copy(host):
    copy = mapped().double()
    copy.load_state_dict(host.state_dict())
    return copy


def pictures(name):
    return images("deit" if name == "mapped" else name).double()


@pytest.mark.parametrize("r", [9, [1, 1, 1, 0], [32, 0, 8, 4]], ids=str)
@pytest.mark.parametrize("name", HOSTS)
def test_ats_is_ats_written_out(name, r):
    model, handle, host = ready(name, r)
    prefix, x = handle.host.prefix, pictures(name)
    padding = False
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            got = model(batch)
        assert [size.shape[1] for size in trace.sizes] == list(handle.tokens)
        for image, scores, source, size in zip(batch, got, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, patch = written_out(host, image, handle.plan)
            torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-7)  # sizes are float32
            wanted = torch.full((64,), -1)
            wanted[patch[prefix:]] = torch.arange(prefix, len(patch))
            assert torch.equal(source, wanted)
            assert size.tolist() == [1.0] * len(patch) + [0.0] * (size.shape[0] - len(patch))
        padding = padding or any((size == 0).any() for size in trace.sizes)
    assert padding, "without padding this test shows little"


def test_patch_by_patch():
    model, handle, host = ready("deit", 9, ascending=False)
    x = pictures("deit")
    with torch.no_grad():
        for image, scores in zip(x, model(x), strict=True):
            expected, _ = written_out(host, image, handle.plan, ascending=False)
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
            assert not torch.allclose(scores, written_out(host, image, handle.plan)[0], atol=1e-4)


@pytest.mark.parametrize("name", HOSTS)
def test_trimming_changes_lengths_and_nothing_else(name):
    padded, handle, _ = ready(name, [20, 0, 9, 3])
    trimmed, short, _ = ready(name, [20, 0, 9, 3], trim=True)
    if name == "mapped":
        trimmed.load_state_dict(padded.state_dict())
    for batch in (pictures(name), pictures(name)[:1]):
        with torch.no_grad(), handle.trace() as whole:
            expected = padded(batch)
        with torch.no_grad(), short.trace() as cut:
            got = trimmed(batch)
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)
        for source, size, wanted_source, wanted in zip(cut.sources, cut.sizes, whole.sources, whole.sizes, strict=True):
            assert torch.equal(source, wanted_source)
            assert size.shape[1] == int(wanted.sum(dim=1).max())
            assert torch.equal(size, wanted[:, : size.shape[1]])
        assert cut.sizes[-1].shape[1] < whole.sizes[-1].shape[1]


def test_gradients_are_those_of_ats_written_out():
    model, handle, host = ready("deit", [20, 9, 5, 0])
    x = pictures("deit")[:1]
    _, grads = gradients(model, x)
    out = written_out(host, x[0], handle.plan)[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_no_nan(dtype):
    """One patch takes all attention in every head, so that most of what is left is padding."""
    model, handle = patched("mae", "ats", 16)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(6.0)
    with torch.no_grad(), torch.autocast("cpu", dtype), handle.trace() as trace:
        assert torch.isfinite(model(images("mae"))).all()
    assert trace.sizes[-1].sum(dim=1).max() < handle.tokens[-1]
    _, grads = gradients(model, images("mae"))
    assert all(torch.isfinite(gradient).all() for gradient in grads.values())


def test_options_are_checked():
    for name in ("ascending", "trim"):
        with pytest.raises(dtem.DtemError, match=f"{name} = 1"):
            patched("deit", "ats", **{name: 1})


def test_every_block():
    assert every_block() == (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    with pytest.raises(dtem.DtemError, match="12"):
        every_block(first=12)
