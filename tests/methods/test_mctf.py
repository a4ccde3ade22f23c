"""MCTF against the method written out token by token from the paper's equations."""

import by_hand
import pytest
import torch

import dtem
from contract.hosts import images, patched
from dtem.measure import flops
from dtem.methods.mctf import schedule


def mctf(prefix, sim=1.0, info=20.0, size=40.0, bidirectional=True):
    def step(states, seen, r):
        count = len(states)
        matrix = sum(seen.matrices) / len(seen.matrices)
        informative = [sum(matrix[q][i].item() for q in range(count)) / count for i in range(count)]

        def attraction(i, j):
            cosine = torch.nn.functional.cosine_similarity(seen.before[i], seen.before[j], dim=0).item()
            worth = ((cosine + 1) / 2) ** (1 / sim) if sim else 1.0
            worth *= (informative[i] * informative[j]) ** (-1 / info) if info else 1.0
            return worth * ((seen.sizes[i] * seen.sizes[j]) ** (-1 / size) if size else 1.0)

        first = [i for i in range(prefix, count) if i % 2 == 0]
        second = [i for i in range(prefix, count) if i % 2]
        table = {(i, j): attraction(i, j) for i in first for j in second}
        there = r // 2 if bidirectional else r
        partner = {i: max(second, key=lambda j, i=i: table[i, j]) for i in first}
        leaving = sorted(first, key=lambda i: -table[i, partner[i]])[:there]
        groups = {j: [j, *(i for i in leaving if partner[i] == j)] for j in second}
        staying = [i for i in first if i not in leaving]
        back = {j: max(staying, key=lambda i, j=j: table[i, j]) for j in second if staying}
        returning = sorted(back, key=lambda j: -table[back[j], j])[: r - there]
        new = [[i] for i in range(prefix)]
        new += [[i, *(k for j in returning if back[j] == i for k in groups[j])] for i in staying]
        new += [groups[j] for j in second if j not in returning]
        weight = [informative[i] * seen.sizes[i] for i in range(count)]
        fused = [sum(weight[i] * states[i] for i in group) / sum(weight[i] for i in group) for group in new]
        return fused, new

    return step


@pytest.mark.parametrize("r", [[20, 0, 9, 3], [32, 16, 8, 4], [1, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "qk_norm"])
def test_mctf_is_mctf_written_out(name, r):
    handle = patched(name, "mctf", r)[1]
    by_hand.check_forward(name, handle, proportional=True, full=mctf(handle.host.prefix))


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"tau_sim": 0}, {"sim": 0}),
        ({"tau_info": 0}, {"info": 0}),
        ({"tau_info": 2.0, "tau_size": 0}, {"info": 2.0, "size": 0}),
        ({"bidirectional": False}, {"bidirectional": False}),
    ],
    ids=str,
)
def test_every_criterion_and_both_directions(options, written):
    handle = patched("deit", "mctf", [32, 9, 5, 0], **options)[1]
    by_hand.check_forward("deit", handle, proportional=True, full=mctf(1, **written))


def test_gradients_are_those_of_mctf_written_out():
    by_hand.check_gradients("mctf", None, True, mctf(1))


def test_half_precision():
    by_hand.check_half_precision("mctf", "hard")


def test_published_schedule_and_budget_spare_the_first_block():
    assert schedule(16) == (0, *[16] * 11)
    _, handle = patched("deit", "mctf", [0, 9, 9, 9])
    handle.r = f"{flops.count(handle.model, handle.host.image).macs / 1e9!r}G"
    assert handle.plan == (0, 9, 9, 9)


def test_the_attention_matrix_is_counted():
    """Of a block that reduces, H n² e multiply-adds more than ToMe's, and a fused matrix product for A × B cosines."""
    counts = {}
    for method in ("mctf", "tome"):
        handle = patched("deit", method, [9, 0, 0, 0])[1]
        counts[method] = flops.count(handle.model, handle.host.image).macs
    a, b, n, heads, head_dim, width = 32, 32, 65, 2, 16, 32
    assert counts["mctf"] - counts["tome"] == heads * n * n * head_dim + a * b * (width - head_dim)


@pytest.mark.parametrize(
    ("name", "value"), [("tau_info", -1), ("tau_sim", "1"), ("tau_size", float("inf")), ("bidirectional", 1)]
)
def test_a_bad_option_is_refused_by_value(name, value):
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        patched("deit", "mctf", **{name: value})


def test_prefix_tokens_receive_nothing():
    _, handle = patched("distilled", "mctf")
    with torch.no_grad(), handle.trace() as trace:
        handle.model(images("distilled"))
    assert all(torch.equal(size[:, :2], torch.ones(2, 2)) for size in trace.sizes)
