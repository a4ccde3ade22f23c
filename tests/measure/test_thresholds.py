"""Each image merges what is alike in it: thresholds against loops over cosines, costs against counting plan by plan."""

import itertools
import math

import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, images, patched
from dtem import ops, schedule
from dtem.measure import flops, thresholds
from dtem.types import Above


def best_edges(z, prefix):
    """For one image, the cosine of every A token with its best B token, by loops."""
    patches = range(prefix, len(z))
    a, b = ([p for p in patches if p % 2 == side] for side in (0, 1))

    def cosine(i, j):
        dot = sum(x * y for x, y in zip(z[i], z[j], strict=True))
        return dot / math.sqrt(sum(x * x for x in z[i]) * sum(y * y for y in z[j]))

    return [max(cosine(i, j) for j in b) for i in a]


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("threshold", [-1.5, 0.2, 0.6, 0.9, 1.5])
def test_a_threshold_takes_the_edges_above_it(prefix, threshold):
    torch.manual_seed(prefix)
    z = torch.randn(1, 13, 3, dtype=torch.float64)
    expected = min(sum(cosine > threshold for cosine in best_edges(z[0].tolist(), prefix)), (13 - prefix) // 2)
    found = ops.match(z, Above(threshold), prefix)
    plain = ops.match(z, expected, prefix)
    for name in ("kept", "merged", "into"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


def test_a_batch_takes_the_mean():
    torch.manual_seed(0)
    z = torch.randn(5, 20, 3, dtype=torch.float64)
    counts = [sum(cosine > 0.8 for cosine in best_edges(one.tolist(), 0)) for one in z]
    assert len(set(counts)) > 1
    assert ops.match(z, Above(0.8)).merged.shape[1] == math.floor(sum(counts) / 5 + 0.5)


def plan_of(handle, image):
    """The r of every block that one image came to, from what a trace saw."""
    with torch.no_grad(), handle.trace() as trace:
        out = handle.model(image)
    counts = [handle.host.patches + handle.host.prefix, *(size.shape[1] for size in trace.sizes)]
    return [before - after for before, after in itertools.pairwise(counts)], out


@pytest.mark.parametrize("method", ["dtem", "tome", "tome_soft", "dtem_no_prop"])
@pytest.mark.parametrize("name", ["deit", "mae", "dinov2_registers"])
def test_an_image_comes_out_as_at_its_own_plan(name, method):
    model, handle = patched(name, method, "t0.9/0.8/0.7/0.6")
    plans = []
    for image in images(name, batch=3).split(1):
        handle.r = "t0.9/0.8/0.7/0.6"
        plan, out = plan_of(handle, image)
        handle.r = plan
        with torch.no_grad():
            torch.testing.assert_close(model(image), out, rtol=1e-5, atol=1e-6)
        plans.append(tuple(plan))
    assert any(map(any, plans))


def test_extremes_are_nothing_and_half():
    model, handle = patched("deit", "dtem", "t2")
    x = images("deit")
    handle.r = "t-2"
    assert plan_of(handle, x)[0] == [32, 16, 8, 4]
    handle.r = "t2"
    out = model(x)
    handle.unpatch()
    torch.testing.assert_close(model(x), out, rtol=1e-5, atol=1e-6)


def counted(handle, plan):
    handle.r = list(plan)
    return flops.count(handle.model, handle.host.image).macs / 1e9


@pytest.mark.parametrize(("name", "method", "batch"), [("deit", "dtem", 1), ("mae", "tome", 1), ("deit", "tome", 4)])
def test_calibration_meets_the_budget_on_average(name, method, batch):
    _, handle = patched(name, method, 5)
    budget = 0.8 * counted(handle, [0, 0, 0, 0])
    x = images(name, batch=16)
    said = handle.calibrate(x, f"{budget}G", batch)
    assert handle.r == "adaptive"
    plans = [plan_of(handle, part)[0] for part in x.split(batch)]
    costs = [counted(handle, plan) for plan in plans]
    assert sum(costs) / len(costs) == pytest.approx(budget, rel=0.02), "one token of so few is 1 %"
    assert said == pytest.approx(sum(costs) / len(costs), rel=2e-3)
    assert len(set(costs)) > 1, "images differ"


def test_it_starts_where_constant_r_cuts():
    """As many edges above the cut, over all images, as the plan takes; that is what pooling them means."""
    torch.manual_seed(0)
    best = torch.randn(6, 9)
    (cut, none, also) = thresholds.quantiles([best, None, best], (4, 0, 9))
    assert (best > cut).sum() == 24
    assert none is None
    assert (best >= also).all()


def test_calibration_is_saved_and_loaded(tmp_path):
    model, handle = patched("deit", "dtem", 0)
    x = images("deit", batch=6)
    handle.calibrate(x, f"{0.8 * counted(handle, [0] * 4)}G")
    file = tmp_path / "one.safetensors"
    for r in ("adaptive", 3):
        handle.r = r
        dtem.save(handle, file)
        other = dtem.from_pretrained(file, fresh("deit"), "adaptive")
        handle.r = "adaptive"
        with torch.no_grad():
            assert torch.equal(other.model(x[:1]), model(x[:1]))
        assert dtem.from_pretrained(file, fresh("deit")).merger.schedule == (
            handle.merger.adaptive if r == "adaptive" else schedule.Constant(3)
        )


@pytest.mark.parametrize("text", ["t0.8", "t-0.25", "t0.9123/0.5/0.25/1e-05"])
def test_text_round_trips(text):
    parsed = schedule.parse(text)
    assert isinstance(parsed, schedule.Threshold)
    assert schedule.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["t", "tx", "t0.8/", "tnan", "tinf"])
def test_text_that_is_no_threshold_is_refused(text):
    with pytest.raises(dtem.DtemError, match=r"not a schedule|must be numbers"):
        schedule.parse(text)


def test_what_cannot_be_is_refused():
    model, handle = patched("deit", "dtem", 0)
    for method in ("evit", "ats", "diffrate", "patch_merger", "token_pooling", "bat", "evo_vit"):
        with pytest.raises(dtem.DtemError, match=f"'{method}' does not merge by edges"):
            patched("deit", method, "t0.8")
    with pytest.raises(dtem.DtemError, match="3 entries, the model 4 blocks"):
        handle.r = "t0.8/0.8/0.8"
    with pytest.raises(dtem.DtemError, match="nothing is calibrated"):
        handle.r = "adaptive"
    with pytest.raises(dtem.DtemError, match="must be one of GFLOPs"):
        handle.calibrate(images("deit"), "16")
    with pytest.raises(dtem.DtemError, match="merges nothing"):
        handle.calibrate(images("deit"), "100G")
    with pytest.raises(dtem.DtemError, match="cannot be met"):
        handle.calibrate(images("deit"), "0.00001G")
    with pytest.raises(dtem.DtemError, match="no images to count on"):
        handle.calibrate([], f"{0.8 * counted(handle, [0] * 4)}G")
    model.train()
    with pytest.raises(dtem.DtemError, match=r"model\.eval\(\)"):
        handle.calibrate(images("deit"), "1G")
    model.eval()
    handle.r = "t0.5"
    for asked in ("plan", "tokens"):
        with pytest.raises(dtem.DtemError, match="no plan for all"):
            getattr(handle, asked)
    with pytest.raises(dtem.DtemError, match="neither counted without images"):
        flops.count(model, handle.host.image)
    handle.mode = "soft"
    with pytest.raises(dtem.DtemError, match="for inference"):
        model(images("deit"))
    with pytest.raises(dtem.DtemError, match="without the shortcut"):
        patched("deit", "dtem", 0, shortcut=True)[1].calibrate(images("deit"), "1G")


def test_neither_compiled_whole_nor_exported():
    model, _ = patched("deit", "tome", "t0.5")
    with pytest.raises(Exception, match="compiled or exported"):
        torch.export.export(model, (images("deit"),))


def test_a_host_that_merges_at_its_front_wants_one_per_block():
    with pytest.raises(dtem.DtemError, match="a threshold per block"):
        patched("lvvit", "dtem", "t0.5")


def test_pictures_that_are_plain_merge_more():
    """What it is for: an image with little in it is cheap."""
    torch.manual_seed(0)
    model = timm.create_model(
        "deit_tiny_patch16_224", img_size=64, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
    ).eval()
    handle = dtem.patch(model, "tome", "t0.95")
    busy = torch.randn(1, 3, 64, 64)
    plain = torch.nn.functional.interpolate(torch.randn(1, 3, 4, 4), scale_factor=16)
    assert sum(plan_of(handle, plain)[0]) > 2 * sum(plan_of(handle, busy)[0])
