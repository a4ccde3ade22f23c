"""eTPS and dTPS against the methods written out token by token, and against published GFLOPs."""

import functools
import math

import by_hand
import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, gradients, images, lively, patched, vit
from dtem import ops
from dtem.measure import flops
from dtem.methods.base import MASKED
from dtem.methods.evit import keep_rate
from dtem.types import Tokens


def squeeze(states, gone, prefix):
    """Those in `gone` join their most similar patch among the others."""
    stay = [index for index in range(len(states)) if index not in gone]
    guests = {index: [] for index in stay}
    for index in gone:
        likeness = {host: cosine(states[index], states[host]) for host in stay[prefix:]}
        best = max(likeness, key=lambda host, likeness=likeness: likeness[host].item())
        guests[best].append((likeness[best], index))
    new = []
    for host in stay:
        total = math.e + sum(similarity.exp() for similarity, _ in guests[host])
        mixed = math.e * states[host] + sum(similarity.exp() * states[index] for similarity, index in guests[host])
        new.append(mixed / total)
    return new, [[host, *(index for _, index in guests[host])] for host in stay]


def cosine(u, v):
    return (u @ v) / (u @ u).sqrt() / (v @ v).sqrt()


def etps(prefix):
    def step(states, looks, r):
        gone = sorted(range(prefix, len(states)), key=lambda at: looks[at].item())[:r]
        return squeeze(states, gone, prefix)

    return step


@pytest.mark.parametrize("r", [9, [32, 0, 9, 3]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "deit3", "mae", "dinov2_registers"])
def test_etps_is_etps_written_out(name, r):
    handle = patched(name, "etps", r)[1]
    by_hand.check_forward(name, handle, etps(handle.host.prefix))


def spread(handle):
    """Predictors that keep some tokens and drop others: scores around 0, far apart."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for predictor in handle.method.predictors.values():
            for layer in (predictor.embed, *predictor.hidden, predictor.out):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 2 / layer.in_features**0.5)
                layer.bias.zero_()


@torch.no_grad()
def balance(handle, x):
    """Make every predictor's scores on `x` half positive, stage after stage."""
    for layer, r in enumerate(handle.plan):
        if r:
            seen, predictor = [], handle.method.predictors[str(layer)]
            hook = predictor.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
            handle.model(x)
            hook.remove()
            scores = seen[0].flatten().sort().values
            middle = len(scores) // 2
            predictor.out.bias[0] -= (scores[middle - 1] + scores[middle]) / 2  # no score is 0 itself


def dtps(handle, prefix, counted, pruned=None):
    """Squeezing before a block: the r lowest scores if `counted`, else all not positive, their share in `pruned`."""

    def early(layer, states, r):
        scores = handle.method.predictors[str(layer)](torch.stack(states[prefix:])[None], None)[0].tolist()
        if counted:
            gone = sorted(range(len(scores)), key=lambda at: scores[at])[:r]
        else:
            gone = [at for at, score in enumerate(scores) if score <= 0]
            pruned.append(len(gone) / len(scores))
        return squeeze(states, [prefix + at for at in gone], prefix)

    return early


@pytest.mark.parametrize("r", [9, [20, 0, 9, 3]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "mae", "dinov2_registers", "no_class_token"])
def test_dtps_is_dtps_written_out(name, r):
    handle = patched(name, "dtps", r)[1]
    spread(handle)
    by_hand.check_forward(name, handle, early=dtps(handle, handle.host.prefix, counted=True))


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_soft_dtps_masks_and_squeezes(name):
    """Without noise, masking is dropping all tokens of negative score: nothing of them is seen but what they gave."""
    model, handle = patched(name, "dtps", [9, 0, 9, 0])
    spread(handle)
    model.double()
    handle.mode = "soft"
    x, host, prefix = images(name).double(), fresh(name).double(), handle.host.prefix
    balance(handle, x)
    with torch.no_grad(), handle.trace() as trace:
        got = model(x)
    for image, scores, size in zip(x, got, trace.sizes[-1], strict=True):
        pruned = []
        with torch.no_grad():
            expected, holds = by_hand.run(host, image, handle.plan, early=dtps(handle, prefix, False, pruned))
        assert all(0.1 < share < 0.9 for share in pruned), "some must go, and some stay"
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)  # a masked key still has weight 1e-6
        assert sorted(size.round()[size > 0.5].tolist()) == sorted(float(len(held)) for held in holds)


def test_the_predictors_learn_through_the_mixture_too(monkeypatch):
    model, handle = patched("deit", "dtps", [9, 0, 0, 0])
    spread(handle)
    model.double()
    handle.mode = "soft"
    x = images("deit").double()
    balance(handle, x)
    _, through = gradients(model, x)
    real = ops.squeeze
    monkeypatch.setattr(ops, "squeeze", lambda *args: real(*args[:4], args[4].detach()))
    _, cut = gradients(model, x)
    key = "dtem.method.predictors.0.embed.weight"
    for gradient in (through[key], cut[key]):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0
    assert (through[key] - cut[key]).abs().max() > 1e-3 * cut[key].abs().max()


def test_attention_sees_masks_not_sizes():
    """A masked token weighs almost nothing, yet its mask has the gradient that it would have in e^logit · mask."""
    _, handle = patched("deit", "dtps")
    handle.mode = "soft"
    keep = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    sizes = keep * torch.tensor([[1.0, 5.0, 1.0]]) + MASKED
    bias = handle.method.bias(Tokens(torch.zeros(1, 3, 4), sizes))
    torch.testing.assert_close(bias[0, :2], torch.zeros(2), rtol=0, atol=1e-5)
    assert bias[0, 2] < -12
    (gradient,) = torch.autograd.grad(bias.exp().sum(), keep)
    torch.testing.assert_close(gradient, torch.ones(1, 3), rtol=0, atol=1e-4)
    handle.mode = "hard"
    assert handle.method.bias(Tokens(torch.zeros(1, 3, 4), sizes)) is None


def test_nobody_is_left_to_take_a_token_in():
    model, handle = patched("mae", "dtps", [9, 0, 9, 0])
    handle.mode = "soft"
    with torch.no_grad():
        for predictor in handle.method.predictors.values():
            predictor.out.bias.copy_(torch.tensor([-99.0, 99.0]))
    _, grads = gradients(model, images("mae"))
    assert all(torch.isfinite(gradient).all() for gradient in grads.values() if gradient is not None)


def test_gradients_are_those_of_etps_written_out():
    """They flow through the cosines that weight the guests, too."""
    by_hand.check_gradients("etps", etps(1))


def test_a_twin_counts_as_much_as_its_host():
    """e^1 for the host itself and for a guest of cosine 1; a host without guests stays exactly as it is."""
    hosts = torch.randn(2, 3, 8)
    guests = 2 * hosts[:, 1:2]
    similarity, host = ops.find_hosts(guests, hosts)
    assert host.tolist() == [[1], [1]]
    mixed = ops.squeeze(hosts, guests, similarity, host)
    torch.testing.assert_close(mixed[:, 1], 1.5 * hosts[:, 1])
    assert torch.equal(mixed[:, [0, 2]], hosts[:, [0, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype):
    hosts, guests = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    exact = ops.squeeze(hosts, guests, *ops.find_hosts(guests, hosts))
    low = ops.squeeze(hosts.to(dtype), guests.to(dtype), *ops.find_hosts(guests.to(dtype), hosts.to(dtype)))
    assert low.dtype == dtype
    torch.testing.assert_close(low.float(), exact, rtol=0, atol=0.05)


def test_registers_take_nobody_in():
    model = lively(vit("vit_small_patch14_reg4_dinov2")()).eval()
    handle = dtem.patch(model, "etps", 16)
    with torch.no_grad(), handle.trace() as trace:
        model(torch.randn(2, 3, 32, 32))
    for source, size in zip(trace.sources, trace.sizes, strict=True):
        assert source.min() >= 5
        assert torch.equal(size[:, :5], torch.ones(2, 5))


def test_no_class_token_no_etps():
    with pytest.raises(dtem.DtemError, match=r"etps.*needs class_token"):
        dtem.patch(vit(global_pool="avg", class_token=False)(), "etps", 4)


@functools.cache
def empty():
    with torch.device("meta"):
        return dtem.patch(timm.create_model("deit_small_patch16_224"), "etps")


@pytest.mark.parametrize(("rate", "gflops"), [(0.7, 3.0), (0.5, 2.3)])
def test_published_gflops(rate, gflops):
    """Of the paper's end-to-end table: EViT's keep rates, without its fused token."""
    handle = empty()
    handle.r = keep_rate(rate, 196, fuse=False)
    assert abs(flops.count(handle.model, (3, 224, 224)).macs / 1e9 - gflops) <= 0.1
