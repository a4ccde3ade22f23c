"""eTPS against the method written out token by token, and against published GFLOPs."""

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
from dtem.methods.evit import keep_rate


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


@pytest.mark.parametrize("r", [9, [20, 0, 9, 3], [32, 16, 8, 4]], ids=str)
@pytest.mark.parametrize("name", ["deit", "distilled", "deit3", "mae", "dinov2_registers"])
def test_etps_is_etps_written_out(name, r):
    model, handle = patched(name, "etps", r)
    model.double()
    x = images(name).double()
    prefix, host = handle.host.prefix, fresh(name).double()
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            got = model(batch)
        for image, scores, source, size in zip(batch, got, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, holds = by_hand.run(host, image, handle.plan, etps(prefix))
            torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
            assert torch.equal(source, by_hand.source_of(holds, prefix, 64))
            assert size.tolist() == [len(held) for held in holds]


def test_gradients_are_those_of_etps_written_out():
    """They flow through the cosines that weigh the guests too."""
    model, handle = patched("deit", "etps", [20, 9, 5, 0])
    model.double()
    x = images("deit", batch=1).double()
    _, grads = gradients(model, x)
    host = fresh("deit").double()
    out = by_hand.run(host, x[0], handle.plan, etps(1))[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-8, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


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
