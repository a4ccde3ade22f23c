"""BAT against the method written out token by token, and against published GMACs."""

import functools

import by_hand
import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, gradients, images, patched
from dtem.measure import flops
from dtem.methods.bat import BatConfig, keep_rate


def clusters_of(points, count, neighbours):
    """Members of each cluster by density peaks, with loops; `points` is a list of vectors."""
    everyone = range(len(points))
    square = [[(points[i] - points[j]).square().mean().item() for j in everyone] for i in everyone]
    near = [sum(sorted(square[i])[:neighbours]) / min(neighbours, len(points)) for i in everyone]
    largest = max(max(row) for row in square)
    strength = []
    for i in everyone:
        denser = [square[i][j] for j in everyone if (near[j], j) < (near[i], i)]
        distance = min(denser) if denser else largest
        strength.append(torch.tensor(-near[i], dtype=torch.float64).exp().item() * distance**0.5)
    centres = sorted(sorted(everyone, key=lambda i: -strength[i])[:count])
    members = [[centre] for centre in centres]
    for i in everyone:
        if i not in centres:
            members[min(range(count), key=lambda c, i=i: square[i][centres[c]])].append(i)
    return members


def step(prefix, config):
    """BAT as `by_hand` takes it: new states and the old tokens that each holds."""

    def reduce(states, looks, r):
        merged = int(config.match * r)
        clusters = min(r - merged, max(1, int((r - merged) / (config.cluster - 1))))
        by_look = sorted(range(prefix, len(states)), key=lambda i: looks[i].item())
        low, high = by_look[: r - merged + clusters], sorted(by_look[r - merged + clusters :])
        first = high[prefix % 2 :: 2]  # those that stand at even places, counted with the prefix tokens
        second = high[1 - prefix % 2 :: 2]
        alike = torch.nn.functional.cosine_similarity
        best = [max(second, key=lambda j, i=i: alike(states[i], states[j], dim=0).item()) for i in first]
        edges = sorted(zip(first, best, strict=True), key=lambda e: -alike(states[e[0]], states[e[1]], dim=0).item())
        going = dict(edges[:merged])
        groups = [[i] for i in range(prefix)]
        groups += [[i] for i in first if i not in going]
        groups += [[j, *(i for i in going if going[i] == j)] for j in second]
        if low:
            points = [states[i].detach() for i in low]
            groups += [[low[i] for i in group] for group in ordered(points, low, clusters, config.neighbours)]
        weight = [sum(looks[i] for i in group) for group in groups]
        new = [sum(looks[i] * states[i] for i in g) / w for g, w in zip(groups, weight, strict=True)]
        return new, groups

    def ordered(points, low, clusters, neighbours):
        """The package gives clusters in the order in which it met the patches: from the most attentive on."""
        back = clusters_of(points[::-1], clusters, neighbours)
        return [[len(low) - 1 - i for i in group] for group in back]

    return reduce


SETTINGS = [{"match": 0.0}, {"match": 1.0}, {"match": 0.5, "cluster": 2, "neighbours": 2}, {"cluster": 100.0}]


PLANS = [9, [20, 0, 9, 3], [32, 16, 8, 4], [1, 1, 1, 0]]
CASES = [(name, r, {}) for name in ("deit", "distilled", "mae", "dinov2_registers") for r in PLANS]
CASES += [("distilled", r, settings) for settings in SETTINGS for r in PLANS[1:3]]


@pytest.mark.parametrize(("name", "r", "settings"), CASES, ids=str)
def test_bat_is_bat_written_out(name, r, settings):
    model, handle = patched(name, "bat", r, **settings)
    model.double()
    x, host, prefix = images(name).double(), fresh(name).double(), handle.host.prefix
    reduce = step(prefix, handle.method.config)
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            got = model(batch)
        for image, scores, source, size in zip(batch, got, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, holds = by_hand.run(host, image, handle.plan, reduce)
            torch.testing.assert_close(scores, expected, rtol=1e-8, atol=1e-9)
            assert torch.equal(source, by_hand.source_of(holds, prefix, 64))
            assert size.tolist() == [len(held) for held in holds]


def test_gradients_are_those_of_bat_written_out():
    """They flow through the attention that weighs the members too."""
    model, handle = patched("deit", "bat", [20, 9, 5, 0])
    model.double()
    x, host = images("deit", batch=1).double(), fresh("deit").double()
    _, grads = gradients(model, x)
    out = by_hand.run(host, x[0], handle.plan, step(1, handle.method.config))[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-7, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("match", [0.0, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("cluster", [2, 2.5, 4.0, 50.0])
def test_r_is_met_and_there_are_enough_of_both_kinds(match, cluster):
    config = BatConfig(match=match, cluster=cluster)
    for patches in range(2, 200):
        for r in range(1, patches // 2 + 1):
            merged, inattentive, clusters = config.split(r)
            assert merged + inattentive - clusters == r
            assert min(1, inattentive) <= clusters <= inattentive
            assert 2 * merged + inattentive <= patches


@pytest.mark.parametrize(
    ("name", "value"), [("match", -0.1), ("match", True), ("cluster", 1.9), ("cluster", "4"), ("neighbours", 0)]
)
def test_a_bad_option_is_refused_by_value(name, value):
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        patched("deit", "bat", **{name: value})


@functools.cache
def empty():
    with torch.device("meta"):
        return dtem.patch(timm.create_model("deit_small_patch16_224"), "bat")


@pytest.mark.parametrize(("rate", "gmacs", "logged"), [(0.7, 3.0, 3.0048), (0.6, 2.6, None), (0.5, 2.3, 2.3444)])
def test_published_gmacs(rate, gmacs, logged):
    """DeiT-S, as its README prints and its training logs say."""
    handle = empty()
    handle.r = keep_rate(rate, 196)
    count = flops.count(handle.model, handle.host.image).macs / 1e9
    assert count == pytest.approx(gmacs, rel=0.02)
    assert logged is None or count == pytest.approx(logged, rel=0.02)
