"""PPT against the method written out token by token from the paper's equations, and its published GFLOPs."""

import by_hand
import pytest
import timm
import torch

import dtem
from contract.hosts import images, patched
from dtem.measure import flops
from dtem.methods.ppt import schedule


def ppt(prefix, threshold):
    decisions = []

    def step(states, seen, r):
        patches = list(range(prefix, len(states)))
        score = {i: sum(m[0, i] for m in seen.matrices).item() * seen.values[i].norm().item() for i in patches}
        total = sum(score.values())
        share = {i: score[i] / total for i in patches}
        mean = sum(share.values()) / len(patches)
        variance = sum((share[i] - mean) ** 2 for i in patches) / (len(patches) - 1)
        decisions.append(variance < threshold)
        if variance >= threshold:
            gone = sorted(patches, key=lambda i: share[i])[:r]
            stay = [i for i in range(len(states)) if i not in gone]
            return [states[i] for i in stay], [[i] for i in stay]
        first, second = [i for i in patches if i % 2 == 0], [i for i in patches if i % 2]
        alike = torch.nn.functional.cosine_similarity
        table = {(i, j): alike(seen.keys[i], seen.keys[j], dim=0).item() for i in first for j in second}
        partner = {i: max(second, key=lambda j, i=i: table[i, j]) for i in first}
        leaving = sorted(first, key=lambda i: -table[i, partner[i]])[:r]
        groups = [[i] for i in range(prefix)] + [[i] for i in first if i not in leaving]
        groups += [[j, *(i for i in leaving if partner[i] == j)] for j in second]
        sizes = seen.sizes
        return [sum(sizes[i] * states[i] for i in g) / sum(sizes[i] for i in g) for g in groups], groups

    return step, decisions


@pytest.mark.parametrize("threshold", [7e-5, 1.2e-3, float("inf"), 0.0])
@pytest.mark.parametrize("name", ["deit", "distilled"])
def test_ppt_is_ppt_written_out(name, threshold):
    handle = patched(name, "ppt", [20, 9, 9, 3], threshold=threshold)[1]
    step, decisions = ppt(handle.host.prefix, threshold)
    by_hand.check_forward(name, handle, proportional=True, full=step)
    assert {0.0: {False}, float("inf"): {True}}.get(threshold, set(decisions)) == set(decisions)


def test_images_of_one_batch_decide_for_themselves():
    model, handle = patched("deit", "ppt", [20, 9, 9, 3], threshold=1.2e-3)
    x = images("deit", batch=12)
    with torch.no_grad(), handle.trace() as trace:
        together = model(x)
        alone = torch.cat([model(each[None]) for each in x])
    dropped = (trace.sources[0] < 0).sum(dim=1)
    assert set(dropped.tolist()) == {0, 20}, "some images are pooled, some pruned"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_ppt_written_out():
    for threshold in (0.0, float("inf")):
        by_hand.check_gradients("ppt", None, True, ppt(1, threshold)[0], threshold=threshold)


def test_half_precision():
    by_hand.check_half_precision("ppt", "hard")


def test_its_own_gflops():
    """DeiT-S with 50 tokens fewer in each of three blocks: 2.944 GFLOPs (MACs), printed by the published code."""
    with torch.device("meta"):
        handle = dtem.patch(timm.create_model("deit_small_patch16_224"), "ppt", schedule(50))
    assert flops.count(handle.model, handle.host.image).macs / 1e9 == pytest.approx(2.944, rel=0.01)


def test_a_budget_is_met_in_the_published_blocks():
    with torch.device("meta"):
        handle = dtem.patch(timm.create_model("deit_small_patch16_224"), "ppt")
    assert handle.method.budget_blocks == (3, 6, 9)
    assert patched("deit", "ppt")[1].method.budget_blocks is None, "a model of four blocks has none of them"


@pytest.mark.parametrize("value", [-1, True, "7e-5", float("nan")])
def test_a_bad_threshold_is_refused_by_value(value):
    with pytest.raises(dtem.DtemError, match=f"threshold = {value!r}"):
        patched("deit", "ppt", threshold=value)
