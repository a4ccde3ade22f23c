"""ALGM against the method written out patch by patch, on a Segmenter."""

import by_hand
import pytest
import torch

import dtem
from contract.hosts import DEPTH, fresh, images, patch, patched
from dtem import schedule
from dtem.measure import flops
from dtem.visualise.segmentation import show_segmentation

EVERY = {"stages": tuple(range(DEPTH))}
SIDE = 8


def alike(x, y):
    return torch.nn.functional.cosine_similarity(x, y, dim=0).item()


def merged_locally(states, r):
    """Groups of old tokens: the most similar windows give their first patches to their last."""
    windows = []
    for row in range(0, SIDE, 2):
        for column in range(0, SIDE, 2):
            windows.append([1 + (row + i) * SIDE + column + j for i in (0, 1) for j in (0, 1)])

    def similarity(window):
        pairs = [(i, j) for i in window for j in window if i != j]
        return sum(alike(states[i], states[j]) for i, j in pairs) / len(pairs)

    going = {}
    for window in sorted(windows, key=lambda w: -similarity(w)):
        for member in window[:3]:
            if len(going) < r:
                going[member] = window[3]
    return [[i, *(k for k in going if going[k] == i)] for i in range(len(states)) if i not in going]


def merged_globally(states, r):
    first = [i for i in range(1, len(states)) if i % 2 == 0]
    second = [i for i in range(1, len(states)) if i % 2]
    partner = {i: max(second, key=lambda j, i=i: alike(states[i], states[j])) for i in first}
    going = sorted(first, key=lambda i: -alike(states[i], states[partner[i]]))[:r]
    groups = [[0]] + [[i] for i in first if i not in going]
    return groups + [[j, *(i for i in going if partner[i] == j)] for j in second]


def encoded(model, image, plan):
    """Every patch after the last block, written out for one image."""
    states = list(model.embed(image[None])[0])
    holds = [[i] for i in range(len(states))]
    local = True
    for block, r in zip(model.encoder.blocks, plan, strict=True):
        states, _ = by_hand.attend(block, states)
        if r:
            groups = (merged_locally if local else merged_globally)(states, r)
            sizes = [len(held) for held in holds]
            states = [sum(sizes[i] * states[i] for i in g) / sum(sizes[i] for i in g) for g in groups]
            holds, local = [[k for i in g for k in holds[i]] for g in groups], False
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    whole = [None] * (1 + SIDE * SIDE)
    for state, held in zip(states, holds, strict=True):
        for index in held:
            whole[index] = model.encoder.norm(state)
    return torch.stack(whole)


@pytest.mark.parametrize("plan", [[30, 0, 9, 3], [31, 16, 8, 4], [2, 0, 0, 0], [32, 1, 0, 0]], ids=str)
def test_algm_is_algm_written_out(plan):
    model, handle = patched("segmenter", "algm", plan, **EVERY)
    model.double()
    host, x = fresh("segmenter").double(), images("segmenter").double()
    with torch.no_grad():
        got = model.encode(x)
        for image, rows in zip(x, got, strict=True):
            torch.testing.assert_close(rows, encoded(host, image, handle.plan), rtol=1e-5, atol=1e-6)


def test_defaults_are_the_published_blocks_and_a_budget_is_met_there():
    handle = dtem.patch(fresh("segmenter"), "algm", [9, 9, 0, 0])
    assert handle.method.stages == (0, DEPTH // 3)
    assert not handle.method.proportional
    with pytest.raises(dtem.DtemError, match="this method can in blocks 0, 1 only"):
        handle.r = 9
    whole = flops.count(fresh("segmenter"), handle.host.image).macs / 1e9
    handle.r = f"{0.8 * whole!r}G"
    assert handle.plan[0] > 0
    assert flops.count(handle.model, handle.host.image).macs / 1e9 <= 0.8 * whole


def test_a_trace_has_the_merged_tokens_and_the_output_has_every_patch():
    model, handle = patched("segmenter", "algm", [30, 9, 0, 0])
    x = images("segmenter")
    with torch.no_grad(), handle.trace() as trace:
        assert model(x).shape == fresh("segmenter")(x).shape
    counts = schedule.tokens(handle.plan, 64, 1)
    assert [size.shape[1] for size in trace.sizes] == list(counts) == list(handle.tokens)
    assert all(torch.equal(size.sum(dim=1), torch.full((2,), 65.0)) for size in trace.sizes)
    with handle.at(r=0), torch.no_grad():
        assert torch.equal(model(x), fresh("segmenter")(x))


def test_an_image_does_not_depend_on_its_batch_and_gradients_do_not_on_checkpointing():
    model, _ = patched("segmenter", "algm", [30, 9, 0, 0])
    x = images("segmenter", batch=3)
    with torch.no_grad():
        torch.testing.assert_close(model(x[1:2])[0], model(x)[1], rtol=1e-4, atol=1e-5)
    grads = []
    for checkpointing in (False, True):
        model.encoder.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        model(x).square().mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)
    handle = dtem.Handle(model)
    handle.unpatch()
    with torch.no_grad():
        assert torch.equal(model(x), fresh("segmenter")(x))


def test_a_picture_has_the_groups_of_both_parts():
    _, handle = patched("segmenter", "algm", [30, 9, 0, 0])
    picture = (torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(0)) * 255).byte().numpy()
    for part, counts in (("attention", [64, 34, 25, 25]), ("mlp", [34, 25, 25, 25])):
        drawn = show_segmentation(handle, picture, blocks="all", part=part)
        (view,) = drawn.views
        assert drawn.num_groups(view) == counts


def test_a_classifier_is_refused():
    with pytest.raises(dtem.DtemError, match=r"algm.*needs grid"):
        patch(fresh("deit"), "algm", [9, 9, 0, 0])


@pytest.mark.parametrize(
    ("stages", "said"), [((9,), r"blocks 0 … 3"), ([0], "tuple of blocks"), ((-1,), "tuple of blocks")]
)
def test_bad_stages_are_refused(stages, said):
    with pytest.raises(dtem.DtemError, match=said):
        patched("segmenter", "algm", [9, 0, 0, 0], stages=stages)
