"""PiToMe against the method written out token by token from the paper's equations."""

import math

import by_hand
import pytest

import dtem
from contract.hosts import DEPTH, patched
from dtem.measure import flops


def pitome(prefix, margin=0.9, protect="late"):
    def step(states, seen, r):
        patches = list(range(prefix, len(states)))
        alike = {}
        for i in patches:
            for j in patches:
                x, y = seen.keys[i], seen.keys[j]
                alike[i, j] = (x @ y / (x.norm() * y.norm())).item()
        limit = margin * (1 - seen.layer / DEPTH)

        def pull(c):
            return c - limit if c >= limit else math.exp(c - limit) - 1

        energy = {i: sum(pull(alike[i, j]) for j in patches) / len(patches) for i in patches}
        order = sorted(patches, key=lambda i: -energy[i])
        protecting = {"all": True, "late": seen.layer >= DEPTH / 2, "early": seen.layer < DEPTH / 2}[protect]
        merging = order[: 2 * r] if protecting else order
        first, second = merging[::2], merging[1::2]
        partner = {i: max(second, key=lambda j, i=i: alike[i, j]) for i in first}
        leaving = sorted(first, key=lambda i: -alike[i, partner[i]])[:r]
        groups = [[i, *(k for k in leaving if partner[k] == i)] for i in range(len(states)) if i not in leaving]
        sizes = seen.sizes
        return [sum(sizes[i] * states[i] for i in g) / sum(sizes[i] for i in g) for g in groups], groups

    return step


@pytest.mark.parametrize("r", [[20, 0, 9, 3], [32, 16, 8, 4], [1, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("name", ["distilled", "qk_norm"])
def test_pitome_is_pitome_written_out(name, r):
    handle = patched(name, "pitome", r)[1]
    by_hand.check_forward(name, handle, proportional=True, full=pitome(handle.host.prefix))


@pytest.mark.parametrize(("margin", "protect"), [(0.75, "all"), (0.3, "early"), (1.0, "late"), (0, "all")])
def test_margins_and_protected_blocks(margin, protect):
    handle = patched("deit", "pitome", [20, 9, 9, 3], margin=margin, protect=protect)[1]
    by_hand.check_forward("deit", handle, proportional=True, full=pitome(1, margin, protect))


def test_mae_weights_protect_early():
    handle = patched("mae", "pitome")[1]
    assert handle.host.masked == handle.method.protects(0)
    assert patched("deit", "pitome")[1].method.protects(DEPTH - 1)
    assert not patched("deit", "pitome")[1].method.protects(0)


def test_gradients_are_those_of_pitome_written_out():
    by_hand.check_gradients("pitome", None, True, pitome(1))


def test_half_precision():
    by_hand.check_half_precision("pitome", "hard")


def test_all_cosines_are_counted():
    counts = {}
    for method in ("pitome", "tome"):
        handle = patched("deit", method, [9, 0, 0, 0])[1]
        counts[method] = flops.count(handle.model, handle.host.image).macs
    assert counts["pitome"] - counts["tome"] == (64 * 64 - 32 * 32) * 16


@pytest.mark.parametrize(("name", "value"), [("margin", 1.5), ("margin", True), ("protect", "some")])
def test_a_bad_option_is_refused_by_value(name, value):
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        patched("deit", "pitome", **{name: value})
