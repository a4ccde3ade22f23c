"""EViT against the method written out token by token, and against published GFLOPs."""

import csv
import functools
import math
from pathlib import Path

import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, gradients, images, lively, patched, vit
from dtem.measure import flops
from dtem.methods.evit import keep_rate

PAPER = Path(__file__).resolve().parent.parent / "data" / "paper"


def written_out(model, image, plan, fuse=True, weigh=False):
    """Scores of one image, and which of its patches each token holds at the end. Loops and lists; with `weigh`, sizes
    count in attention."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    holds = [[index] for index in range(len(states))]
    for block, r in zip(model.blocks, plan, strict=True):
        attn = block.attn
        width, count = attn.head_dim, len(states)
        sizes = torch.tensor([float(len(held)) if weigh else 1.0 for held in holds], dtype=image.dtype)
        qkv = torch.stack([attn.qkv(block.norm1(state)) for state in states]).view(count, 3, attn.num_heads, width)
        heads, looks = [], torch.zeros(count, dtype=image.dtype)
        for head in range(attn.num_heads):
            q, k, v = attn.q_norm(qkv[:, 0, head]), attn.k_norm(qkv[:, 1, head]), qkv[:, 2, head]
            matrix = (q @ k.T / math.sqrt(width)).exp() * sizes
            matrix = matrix / matrix.sum(dim=1, keepdim=True)
            heads.append(matrix @ v)
            looks = looks + matrix[0] / attn.num_heads
        update = attn.proj(attn.norm(torch.cat(heads, dim=1)))
        states = [state + block.ls1(change) for state, change in zip(states, update, strict=True)]
        if r:
            away = sorted(range(prefix, count), key=lambda at, looks=looks: looks[at].item())[: r + fuse]
            stay = [index for index in range(count) if index not in away]
            fused = sum(looks[index] * states[index] for index in away)
            together = [first for index in away for first in holds[index]]
            states = [states[index] for index in stay] + ([fused] if fuse else [])
            holds = [holds[index] for index in stay] + ([together] if fuse else [])
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    states = [model.norm(state) for state in states]
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2, holds
    pooled = states[0]
    if model.global_pool == "avg":
        total = sum(map(len, holds[prefix:]))
        pooled = sum(state * len(held) / total for state, held in zip(states[prefix:], holds[prefix:], strict=True))
    return model.head(model.fc_norm(pooled)), holds


@pytest.mark.parametrize("fuse", [True, False], ids=["fuse", "drop"])
@pytest.mark.parametrize("r", [9, [20, 0, 9, 3], [32, 16, 8, 4], [1, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("name", ["deit", "distilled", "deit3", "mae", "dinov2_registers", "qk_norm", "scale_norms"])
def test_evit_is_evit_written_out(name, r, fuse):
    model, handle = patched(name, "evit", r, fuse=fuse)
    model.double()
    x = images(name).double()
    prefix, host = handle.host.prefix, fresh(name).double()
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            got = model(batch)
        for image, scores, source, size in zip(batch, got, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, holds = written_out(host, image, handle.plan, fuse)
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
            wanted = torch.full((prefix + 64,), -1)
            for token, held in enumerate(holds):
                wanted[held] = token
            assert torch.equal(source, wanted[prefix:])
            assert size.tolist() == [len(held) for held in holds]


def test_with_proportional_attention():
    model, handle = patched("deit", "evit", [20, 9, 5, 0], proportional=True)
    x = images("deit", batch=1)
    with torch.no_grad():
        got = model(x)[0]
        expected, _ = written_out(fresh("deit"), x[0], handle.plan, weigh=True)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        plain, _ = written_out(fresh("deit"), x[0], handle.plan)
        assert not torch.allclose(got, plain, atol=1e-3), "the switch must matter"


def test_gradients_are_those_of_evit_written_out():
    """They flow through the attention that weighs the fused tokens too."""
    model, handle = patched("deit", "evit", [20, 9, 5, 0])
    model.double()
    x = images("deit", batch=1).double()
    _, grads = gradients(model, x)
    host = fresh("deit").double()
    out = written_out(host, x[0], handle.plan)[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_fusing_is_on_and_proportional_attention_off():
    _, handle = patched("mae", "evit")
    assert handle.method.config.fuse
    assert not handle.method.proportional
    assert handle.method.keeps_mass
    assert not patched("mae", "evit", fuse=False)[1].method.keeps_mass


@pytest.mark.parametrize("bad", ["yes", 1, None])
def test_a_bad_option_is_refused_by_value(bad):
    with pytest.raises(dtem.DtemError, match=f"fuse = {bad!r}"):
        patched("deit", "evit", fuse=bad)


@pytest.mark.parametrize("settings", [{"class_token": False}, {"class_token": False, "reg_tokens": 4}], ids=str)
def test_a_model_without_a_class_token_is_refused(settings):
    model = vit(global_pool="avg", **settings)()
    with pytest.raises(dtem.DtemError, match=r"evit.*needs class_token.*vit_tiny_patch16_224"):
        dtem.patch(model, "evit", 4)
    assert not hasattr(model, "dtem")


def test_registers_are_neither_ranked_nor_fused():
    model = lively(vit("vit_small_patch14_reg4_dinov2")()).eval()
    handle = dtem.patch(model, "evit", 16)
    with torch.no_grad(), handle.trace() as trace:
        model(torch.randn(2, 3, 32, 32))
    for source, size in zip(trace.sources, trace.sizes, strict=True):
        assert source.min() == 5
        assert torch.equal(size[:, :5], torch.ones(2, 5))


@pytest.mark.parametrize(
    ("rate", "fuse", "left"),
    [(0.7, True, (139, 99, 71)), (0.7, False, (138, 97, 68)), (0.5, True, (99, 51, 27)), (1.0, True, (196, 196, 196))],
)
def test_keep_rates(rate, fuse, left):
    """⌈0.7 · 196⌉ = 138 kept and one fused; ⌈0.7 · 139⌉ = 98 and one; ⌈0.7 · 99⌉ = 70 and one."""
    plan = keep_rate(rate, 196, fuse=fuse)
    assert [196 - sum(plan[: layer + 1]) for layer in (3, 6, 9)] == list(left)
    assert [layer for layer, r in enumerate(plan) if r] == ([] if rate == 1 else [3, 6, 9])
    assert dtem.schedule.clamp(plan, 196) == plan, "a schedule takes it as it is"


@pytest.mark.parametrize(("settings", "said"), [({"rate": 0.0}, "0.0"), ({"rate": 1.1}, "1.1"), ({"at": [12]}, "12")])
def test_a_bad_keep_rate_is_refused(settings, said):
    with pytest.raises(dtem.DtemError, match=said):
        keep_rate(**{"rate": 0.7, "patches": 196, **settings})


HOSTS = {
    "DeiT-S": ("deit_small_patch16_224", "token"),
    "DeiT-B": ("deit_base_patch16_224", "token"),
    "MAE-B": ("vit_base_patch16_224", "avg"),
    "MAE-L": ("vit_large_patch16_224", "avg"),
}


@functools.cache
def empty(model):
    name, pool = HOSTS[model]
    with torch.device("meta"):
        return dtem.patch(timm.create_model(name, global_pool=pool), "evit")


def count(model, rate):
    """Operations at a keep rate. With 24 blocks, in the 8th, 14th and 20th: twice the published places. (DTEM's paper
    does not print where; these meet its figures.)"""
    handle = empty(model)
    at = (7, 13, 19) if handle.host.depth == 24 else (3, 6, 9)
    handle.r = keep_rate(rate, handle.host.patches, handle.host.depth, at)
    return flops.count(handle.model, handle.host.image)


def assert_printed(value, printed):
    """Within 2 % of what is printed, or one unit of its last digit."""
    unit = 10.0 ** -len(printed.partition(".")[2])
    assert abs(value - float(printed)) <= max(0.02 * float(printed), unit), f"{value:.4f} against {printed}"


@pytest.mark.parametrize(("rate", "gflops"), [(0.7, "3.0"), (0.5, "2.3")])
def test_its_own_gflops(rate, gflops):
    assert_printed(count("DeiT-S", rate).macs / 1e9, gflops)


with (PAPER / "modular.csv").open(newline="") as file:
    TABLE = [row for row in csv.DictReader(file) if row["method"] == "EViT"]


def test_the_table_is_whole():
    assert len(TABLE) == 8
    assert {row["reduction"] for row in TABLE} == {"35", "50"}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['reduction']}")
def test_every_gflops_value_of_the_modular_table(row):
    """Keep rate 0.7 is behind "35 %", 0.5 behind "50 %"."""
    rate = {"35": 0.7, "50": 0.5}[row["reduction"]]
    assert_printed(count(row["model"], rate).paper / 1e9, row["gflops"])
