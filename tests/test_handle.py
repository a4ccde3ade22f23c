"""`dtem.patch` and the handle: settings, schedules, modes, traces, and error messages."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dtem
from contract.hosts import CLASSIFYING, fresh, images, patched
from dtem.measure import flops
from dtem.methods import METHODS
from dtem.methods.dense import DenseDtem, DenseDtemConfig
from dtem.methods.dynamicvit import DynamicVitConfig


@pytest.fixture
def handle():
    return dtem.patch(fresh("deit"), r=4)


def test_defaults():
    handle = dtem.patch(fresh("deit"))
    assert handle.method.name == "dtem"
    assert handle.r == 0
    assert handle.mode == "hard"
    assert handle.plan == (0, 0, 0, 0)


def test_describes_its_host(handle):
    host = handle.host
    assert host.name == "deit_tiny_patch16_224"
    assert (host.depth, host.width, host.heads, host.head_dim) == (4, 32, 2, 16)
    assert (host.prefix, host.patches, host.pooling, host.image) == (1, 64, "prefix", (3, 32, 32))


@pytest.mark.parametrize(
    ("name", "prefix", "patches", "pooling"),
    [
        ("distilled", 2, 64, "prefix"),
        ("dinov2_registers", 5, 64, "prefix"),
        ("siglip", 0, 64, "attention"),
        ("mae", 1, 64, "mean"),
        ("max", 1, 64, "max"),
        ("avgmax", 1, 64, "avgmax"),
        ("non_square", 1, 96, "prefix"),
    ],
)
def test_describes_other_hosts(name, prefix, patches, pooling):
    _, handle = patched(name, "tome")
    assert (handle.host.prefix, handle.host.patches, handle.host.pooling) == (prefix, patches, pooling)


@pytest.mark.parametrize(
    ("r", "plan", "tokens"),
    [
        (4, (4, 4, 4, 4), (61, 57, 53, 49)),
        ("4", (4, 4, 4, 4), (61, 57, 53, 49)),
        ([8, 0, 2, 1], (8, 0, 2, 1), (57, 57, 55, 54)),
        ("8/0/2/1", (8, 0, 2, 1), (57, 57, 55, 54)),
        ("50%", (32, 16, 8, 4), (33, 17, 9, 5)),
        (0.25, (16, 12, 9, 6), (49, 37, 28, 22)),
        (32, (32, 16, 8, 4), (33, 17, 9, 5)),
        (0, (0, 0, 0, 0), (65, 65, 65, 65)),
    ],
)
def test_plan_and_tokens(handle, r, plan, tokens):
    handle.r = r
    assert handle.r == r
    assert handle.plan == plan
    assert handle.tokens == tokens
    with torch.no_grad():
        assert handle.model.forward_features(images("deit")).shape[1] == tokens[-1]


def test_shows_what_it_is(handle):
    text = repr(handle)
    for part in ("deit_tiny_patch16_224", "dtem", "r=4", "hard"):
        assert part in text
    handle.mode = "soft"
    assert "soft" in repr(handle)


def test_a_second_handle_controls_the_same_model(handle):
    dtem.Handle(handle.model).r = 7
    assert handle.r == 7


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (-1, "-1"),
        (-0.2, "-0.2"),
        (0.7, "0.7"),
        (33, "33"),
        (10**9, "1000000000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("-3", "-3"),
        ("many", "'many'"),
        ("", "''"),
        ("%", "'%'"),
        ("90%", "0.9"),
        ("nanG", "nan"),
        ("-1G", "-1"),
        (None, "None"),
        (True, "True"),
        ({}, "{}"),
        ([4, 4], "2 entries"),
        ([4, 4, 4, 40], "40"),
        ([4, 4, 4, -1], "-1"),
        ([1.5, 2, 3, 4], "1.5"),
        ("4/4", "2 entries"),
        ("4/x/4/4", "'4/x/4/4'"),
        ("4@3", "3"),
        ((4, 2.0), "2.0"),
    ],
)
def test_a_bad_r_is_refused_by_value(handle, bad, named):
    with pytest.raises(dtem.DtemError) as error:
        handle.r = bad
    assert named in str(error.value)
    assert handle.r == 4, "a refused value leaves the old one"
    assert handle.plan == (4, 4, 4, 4)


@pytest.mark.parametrize("bad", [-1, 33, "many", None, [4, 4], "0.000001G"])
def test_patching_with_a_bad_r_leaves_the_model_alone(bad):
    model = fresh("deit")
    before = type(model)
    with pytest.raises(dtem.DtemError):
        dtem.patch(model, r=bad)
    assert type(model) is before
    assert not hasattr(model, "dtem")


def test_options_are_keywords_or_a_config():
    by_name = dtem.patch(fresh("deit"), "dtem", r=16, temperature=0.3)
    by_config = dtem.patch(fresh("deit"), dtem.DtemConfig(temperature=0.3), r=16)
    assert by_name.method.config == by_config.method.config == dtem.DtemConfig(temperature=0.3)
    assert by_config.r == 16
    for part, other in zip(by_name.method.parameters(), by_config.method.parameters(), strict=True):
        assert torch.equal(part, other)
    assert type(dtem.patch(fresh("segmenter"), DenseDtemConfig(relaxed=8), r=4).method) is DenseDtem


def test_a_config_goes_with_no_keywords_and_with_one_method_only():
    with pytest.raises(dtem.DtemError, match=r"scale: with a DtemConfig, set options there"):
        dtem.patch(fresh("deit"), dtem.DtemConfig(), scale=0.2)
    with pytest.raises(dtem.DtemError, match=r"DynamicVitConfig.*dtps, dynamicvit.*by name"):
        dtem.patch(fresh("deit"), DynamicVitConfig())


def test_an_unknown_method_is_refused_with_those_that_are_known():
    with pytest.raises(dtem.DtemError, match="'tomme'") as error:
        dtem.patch(fresh("deit"), "tomme")
    assert all(name in str(error.value) for name in METHODS)


@pytest.mark.parametrize("method", CLASSIFYING)
def test_an_unknown_option_is_refused_with_those_that_are_known(method):
    with pytest.raises(dtem.DtemError, match=f"{method}.*'tau'.*proportional"):
        dtem.patch(fresh("deit"), method, tau=1)


@pytest.mark.parametrize(
    "option",
    [
        {"proportional": "yes"},
        {"dim": 0},
        {"dim": -3},
        {"init": "zeros"},
        {"exclude": "all"},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"scale": 0.0},
        {"candidates": 0},
        {"hidden": (16,)},
        {"hidden": (0,), "init": "random"},
        {"dim": "wide"},
        {"dim": 2.5},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"candidates": 1.5},
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_value(option):
    name, value = next(iter(option.items()))
    model = fresh("deit")
    with pytest.raises(dtem.DtemError) as error:
        dtem.patch(model, **option)
    assert name in str(error.value)
    assert str(value).strip("()") in str(error.value)
    assert not hasattr(model, "dtem")


def test_a_bad_mode_is_refused(handle):
    with pytest.raises(dtem.DtemError, match=r"'medium'.*hard.*soft"):
        handle.mode = "medium"
    assert handle.mode == "hard"


def test_a_method_without_soft_mode_says_so():
    _, handle = patched("deit", "tome")
    with pytest.raises(dtem.DtemError, match="tome"):
        handle.mode = "soft"
    assert handle.mode == "hard"


@pytest.mark.parametrize("name", ["max", "avgmax"])
def test_pooling_without_soft_mode_says_so(name):
    _, handle = patched(name, "dtem")
    with pytest.raises(dtem.DtemError, match=name):
        handle.mode = "soft"
    assert handle.mode == "hard"


def test_mode_changes_the_forward_and_back(handle):
    x = images("deit")
    with torch.no_grad():
        hard = handle.model(x)
        handle.mode = "soft"
        assert handle.model.forward_features(x).shape[1] == 65, "soft merging keeps every token"
        assert not torch.allclose(handle.model(x), hard)
        handle.mode = "hard"
        assert torch.equal(handle.model(x), hard)


def test_a_cold_temperature_makes_soft_hard():
    model, handle = patched("deit", "dtem", r=6, temperature=1e-4, scale=1e-2)
    x = images("deit")
    with torch.no_grad():
        hard = model(x)
        handle.mode = "soft"
        torch.testing.assert_close(model(x), hard, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "method"), [("deit", "dtem"), ("siglip", "tome"), ("dinov2_registers", "dtem")])
def test_a_budget_is_met_and_used(name, method):
    model, handle = patched(name, method, r=0)
    unmerged = flops.count(model, handle.host.image).macs / 1e9
    budget = round(0.7 * unmerged, 6)
    handle.r = f"{budget}G"
    assert handle.r == f"{budget}G"
    assert sum(handle.plan) > 0
    assert flops.count(model, handle.host.image).macs / 1e9 <= budget
    milder = list(handle.plan)
    last = max(layer for layer, r in enumerate(milder) if r == max(milder))
    milder[last] -= 1
    handle.r = milder
    assert flops.count(model, handle.host.image).macs / 1e9 > budget, "one token less would be over the budget"
    with torch.no_grad():
        assert torch.isfinite(model(images(name))).all()


def test_a_budget_of_more_than_the_model_costs_is_refused_with_its_cost(handle):
    with pytest.raises(dtem.DtemError, match=r"10 GFLOPs is more than the unmerged model takes \(0\.\d+\)"):
        handle.r = "10G"
    assert handle.plan == (4, 4, 4, 4)


def test_a_budget_out_of_reach_is_refused_with_what_can_be_reached(handle):
    with pytest.raises(dtem.DtemError, match=r"1e-06.*leaves 0\.\d+"):
        handle.r = "0.000001G"
    assert handle.plan == (4, 4, 4, 4)


def test_a_budget_in_soft_mode_counts_what_inference_costs(handle):
    handle.r = "0.002G"
    expected = handle.plan
    assert sum(expected) > 0
    handle.r = 4
    handle.mode = "soft"
    handle.r = "0.002G"
    assert handle.plan == expected
    assert handle.mode == "soft"


def test_at_sets_and_restores(handle):
    handle.r = "0.002G"
    plan, x = handle.plan, images("deit")
    with torch.no_grad():
        before = handle.model(x)
        with handle.at(r=8) as same:
            assert same is handle
            assert (handle.r, handle.plan, handle.mode) == (8, (8, 8, 8, 8), "hard")
            with handle.at(mode="soft"):
                assert (handle.r, handle.mode) == (8, "soft")
            with handle.at(r="50%", mode="soft"):
                assert handle.plan == (32, 16, 8, 4)
            assert (handle.r, handle.mode) == (8, "hard")
        assert (handle.r, handle.plan, handle.mode) == ("0.002G", plan, "hard")
        assert torch.equal(handle.model(x), before)


@pytest.mark.parametrize("bad", [{"r": 33}, {"mode": "medium"}, {"r": "many", "mode": "soft"}])
def test_at_restores_after_an_error(handle, bad):
    with pytest.raises(dtem.DtemError), handle.at(**bad):
        raise AssertionError("not reached")
    with pytest.raises(RuntimeError, match="mine"), handle.at(r=8, mode="soft"):
        raise RuntimeError("mine")
    assert (handle.r, handle.mode) == (4, "hard")


def test_parameters_are_those_that_are_trained(handle):
    parameters = list(handle.parameters())
    assert len(parameters) == 2 * handle.host.num_trainable_blocks == 6
    assert all(parameter.requires_grad for parameter in parameters)
    assert list(patched("deit", "tome")[1].parameters()) == []


def test_a_trace_records_its_own_model_only(handle):
    x, other = images("deit"), patched("deit", "tome", r=7)[1]
    with torch.no_grad(), handle.trace() as trace, other.trace() as other_trace:
        handle.model(x)
        other.model(x[:1])
    assert [size.shape for size in trace.sizes] == [(2, 61), (2, 57), (2, 53), (2, 49)]
    assert [size.shape for size in other_trace.sizes] == [(1, 58), (1, 51), (1, 44), (1, 37)]


def test_a_trace_records_forwards_of_other_threads(handle):
    x = images("deit")

    def run(image):
        with torch.no_grad():
            return handle.model(image[None])

    with handle.trace() as trace, ThreadPoolExecutor(2) as pool:
        list(pool.map(run, x))
    assert len(trace.sizes) == len(trace.sources) == 8
    assert sorted(size.shape[1] for size in trace.sizes) == [49, 49, 53, 53, 57, 57, 61, 61]


def test_a_copy_made_inside_a_trace_is_not_recorded(handle):
    with torch.no_grad(), handle.trace() as trace:
        copied = copy.deepcopy(handle.model)
        copied(images("deit"))
        assert trace.sizes == []
        handle.model(images("deit"))
    assert len(trace.sizes) == 4
    assert copied.dtem.trace is None


def test_a_trace_without_a_recorded_forward_warns(handle):
    compiled = torch.compile(handle.model, backend="eager")
    with torch.no_grad(), pytest.warns(UserWarning, match="recorded nothing.*compiled"), handle.trace() as trace:
        compiled(images("deit"))
    assert trace.sizes == []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with handle.trace() as trace:
            handle.model(images("deit"))
    assert len(trace.sizes) == 4


def test_auxiliary_losses_are_those_of_its_own_model():
    (model, handle), (other, other_handle) = patched("deit", "dynamicvit"), patched("deit", "dynamicvit")
    handle.mode = other_handle.mode = "soft"
    x = images("deit")
    with handle.auxiliary_losses() as losses, torch.no_grad():
        other(x)
        assert losses == {}
        model(x)
    assert set(losses) == {"ratio"}


def test_trace_ends_with_its_block(handle):
    x = images("deit")
    with torch.no_grad():
        with handle.trace() as trace:
            handle.model(x)
        handle.model(x)
        assert len(trace.sources) == len(trace.sizes) == 4
        with handle.trace() as outer:
            with handle.trace() as inner:
                handle.model(x)
            handle.model(x[:1])
    assert [source.shape[0] for source in inner.sources] == [2] * 4
    assert [source.shape[0] for source in outer.sources] == [1] * 4


def test_trace_without_merging_maps_every_patch_to_itself(handle):
    handle.r = 0
    with torch.no_grad(), handle.trace() as trace:
        handle.model(images("deit"))
    assert len(trace.sources) == 4
    for source, size in zip(trace.sources, trace.sizes, strict=True):
        assert torch.equal(source, torch.arange(1, 65).expand(2, -1))
        assert torch.equal(size, torch.ones(2, 65))


def test_a_trace_outlives_an_error(handle):
    with pytest.raises(RuntimeError, match="mine"), handle.trace():
        raise RuntimeError("mine")
    with torch.no_grad(), handle.trace() as trace:
        handle.model(images("deit"))
    assert len(trace.sizes) == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda handle: handle.r,
        lambda handle: setattr(handle, "r", 3),
        lambda handle: handle.plan,
        lambda handle: handle.tokens,
        lambda handle: handle.mode,
        lambda handle: setattr(handle, "mode", "soft"),
        lambda handle: handle.host,
        lambda handle: handle.unpatch(),
        lambda handle: dtem.Handle(handle.model),
    ],
    ids=["r", "r=", "plan", "tokens", "mode", "mode=", "host", "unpatch", "Handle"],
)
def test_a_handle_is_no_use_after_unpatching(handle, use):
    handle.unpatch()
    with pytest.raises(dtem.DtemError, match="not patched"):
        use(handle)


def test_a_handle_of_an_unpatched_model_can_still_be_shown(handle):
    handle.unpatch()
    assert "VisionTransformer" in repr(handle)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "deit_small_patch16_224"], ids=["module", "text"])
def test_a_handle_needs_a_patched_model(thing):
    with pytest.raises(dtem.DtemError, match="not patched"):
        dtem.Handle(thing)


def test_a_model_of_one_block():
    model = fresh("deit")
    model.blocks = model.blocks[:1]
    handle = dtem.patch(model, r=5)
    for r in (5, 0, "5@1", [3], "30%"):
        handle.r = r
        with torch.no_grad():
            assert model.forward_features(images("deit")).shape[1] == handle.tokens[-1]
