"""Token Pooling against the method written out token by token."""

import by_hand
import pytest
import torch

import dtem
from contract.hosts import images, patched
from dtem import ops


def medoids_by_hand(points, weights, count, iterations):
    """Cluster of each point, with loops; `points` and `weights` are lists."""

    table = [[sum((a - b) ** 2 for a, b in zip(u, v, strict=True)) for v in points] for u in points]

    def far(i, j):
        return table[i][j]

    def assign(medoids):
        nearest = [min(range(count), key=lambda k, i=i: (far(i, medoids[k]), k)) for i in range(len(points))]
        for k, medoid in enumerate(medoids):
            nearest[medoid] = k
        return nearest

    medoids = sorted(sorted(range(len(points)), key=lambda i: (-weights[i], i))[:count])
    for _ in range(iterations):
        member = assign(medoids)
        for k in range(count):
            group = [i for i in range(len(points)) if member[i] == k]
            medoids[k] = min(group, key=lambda m, group=group: (sum(weights[i] * far(i, m) for i in group), m))
    return assign(medoids)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 4, 11, 20])
def test_clusters_are_those_of_loops(count, iterations, batch):
    x = torch.randn(batch, 20, 3, dtype=torch.float64)
    weight = torch.rand(batch, 20, dtype=torch.float64) + 0.01
    member = ops.cluster(x, weight, count, iterations)
    for image in range(batch):
        expected = medoids_by_hand(x[image].tolist(), weight[image].tolist(), count, iterations)
        assert member[image].tolist() == expected


def test_iterations_change_something_and_lower_the_cost():
    x, weight = torch.randn(4, 200, 4), torch.rand(4, 200)
    costs = []
    for iterations in (0, 1, 5):
        member = ops.cluster(x, weight, 16, iterations)
        mean = ops.pool(x, weight, member, 16)
        costs.append((weight * (x - ops.take(mean, member)).square().sum(dim=2)).sum().item())
    assert costs[0] > costs[1] > costs[2]


def test_twins_leave_no_cluster_empty():
    """Many tokens alike: nearest medoids tie, and still every medoid has its own cluster."""
    x = torch.randn(2, 3, 5).repeat_interleave(6, dim=1)
    for count in (1, 7, 17, 18):
        member = ops.cluster(x, torch.rand(2, 18), count, 5)
        for row in member:
            assert row.unique().tolist() == list(range(count))


def test_clusters_do_not_depend_on_a_common_offset():
    x, weight = torch.randn(2, 40, 6), torch.rand(2, 40)
    assert torch.equal(ops.cluster(x, weight, 12, 5), ops.cluster(x + 1000.0, weight, 12, 5))


def pooling(prefix):
    def step(states, looks, r):
        count = len(states) - prefix - r
        points, weights = [state.tolist() for state in states[prefix:]], looks[prefix:].tolist()
        member = medoids_by_hand(points, weights, count, 5)
        new, groups = list(states[:prefix]), [[index] for index in range(prefix)]
        for k in range(count):
            group = [prefix + i for i, own in enumerate(member) if own == k]
            new.append(sum(looks[i] * states[i] for i in group) / sum(looks[i] for i in group))
            groups.append(group)
        return new, groups

    return step


@pytest.mark.parametrize("r", [9, [32, 0, 9, 3]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "mae", "dinov2_registers"])
def test_token_pooling_is_itself_written_out(name, r):
    handle = patched(name, "token_pooling", r)[1]
    by_hand.check_forward(name, handle, pooling(handle.host.prefix))


def test_gradients_are_those_written_out():
    """They flow through the attention that weights the mean, not through the choice of clusters."""
    by_hand.check_gradients("token_pooling", pooling(1))


def test_what_nobody_looks_at_has_a_mean_too():
    """Class attention of exactly 0 (logits far apart) must not become 0 / 0."""
    model, _ = patched("deit", "token_pooling", 20)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:64].mul_(40.0)
        assert torch.isfinite(model(images("deit"))).all()


@pytest.mark.parametrize("bad", [0, 2.5, True, None])
def test_a_bad_option_is_refused_by_value(bad):
    with pytest.raises(dtem.DtemError, match=f"iterations = {bad!r}"):
        patched("deit", "token_pooling", iterations=bad)


def test_proportional_attention_is_off_and_can_be_on():
    x = images("deit")
    with torch.no_grad():
        off, on = (patched("deit", "token_pooling", **options)[0](x) for options in ({}, {"proportional": True}))
    assert not patched("deit", "token_pooling")[1].method.proportional
    assert not torch.allclose(off, on, atol=1e-3)
