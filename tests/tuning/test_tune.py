"""`dtem.tune`: what the search finds, what is stored, and what is refused. Costs are made up: nothing here is timed."""

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch

import dtem
from contract.hosts import HOSTS, fresh, images
from dtem.cli import main
from dtem.errors import DtemError
from dtem.measure import costs, throughput
from dtem.measure.tuned import cost_key
from dtem.schedule import PerLayer, clamp, even_plan
from dtem.tuning import probes, tune
from dtem.tuning.search import Divergence, Search


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 7}
    model = timm.create_model("vit_tiny_patch16_224", **size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def made_up(handle: dtem.Handle, batch: int = 1, *_: object, unmerged: float = 0.012) -> costs.CostTable:
    """2 ms, 2.5 ms for a block of all tokens, and 0.1 ms for a merge."""
    key = cost_key(handle.model, batch)
    steps = tuple(2.5e-3 * share for share in (0.125, 0.125, 0.125, 0.125, 0.25, 0.25))
    return costs.CostTable(key, unmerged, 0.002, steps, (1e-4, 0.0), 0.0)


def made_up_timings(handle: dtem.Handle, plans: list, *_: object) -> dict:
    """The costs of `made_up` as times."""
    table, spread = made_up(handle), throughput.Spread(1.2, 1.1, 1.3, 1.0, 1.4)
    times = {str(PerLayer(plan)): table.seconds(plan, handle.host) for plan in plans}
    return {name: throughput.Timing(t, 1 / t, spread) for name, t in {probes.UNMERGED: 0.012, **times}.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no measurement."""
    monkeypatch.setenv("DTEM_CACHE", str(tmp_path / "costs"))
    monkeypatch.setattr(probes, "measure", made_up)
    monkeypatch.setattr(probes, "time_plans", made_up_timings)
    return tmp_path / "costs"


def photographs(count: int = 20) -> list[torch.Tensor]:
    return [torch.randn(count, 3, 48, 48, generator=torch.Generator().manual_seed(1))]


def test_the_fit_finds_the_costs_that_made_the_times() -> None:
    handle = dtem.patch(tiny())
    true = made_up(handle)
    plans = probes.probe_plans(handle.host, None, 30)
    assert len(set(plans)) == 30
    assert all(clamp(plan, handle.host.patches) == plan for plan in plans)
    fitted = costs.fit(true.key, handle.host, true.unmerged, plans, [true.seconds(plan, handle.host) for plan in plans])
    assert fitted.error < 1e-3
    for plan in ((0, 18, 0, 0), (5, 0, 9, 1), (9, 9, 9, 4)):
        assert fitted.seconds(plan, handle.host) == pytest.approx(true.seconds(plan, handle.host), rel=5e-3)
    assert fitted.seconds((0, 0, 0, 0), handle.host) == true.unmerged


def test_tables_are_kept_by_what_they_are_for(cache: Path) -> None:
    handle = dtem.patch(tiny())
    table = made_up(handle)
    path = costs.save(table)
    assert costs.load(table.key) == table
    assert costs.load(cost_key(handle.model, 16)) is None
    path.write_text(path.read_text().replace('"base": 0.002', '"base": "2"'))
    with pytest.raises(DtemError, match=path.name):
        costs.load(table.key)


def test_a_time_or_a_speed_up_is_r_where_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = dtem.patch(tiny(), "tome")
    with pytest.raises(DtemError, match="dtem tune --model vit_tiny_patch16_224 --method tome"):
        handle.r = "1.4x"
    table = made_up(handle)
    costs.save(table)
    for target, limit in (("1.4x", 0.012 / 1.4), ("8ms", 0.008)):
        handle.r = target
        assert table.seconds(handle.plan, handle.host) <= limit
        fewer = even_plan(sum(handle.plan) - 1, 36, 4, range(4))
        assert table.seconds(fewer, handle.host) > limit
        assert handle.r == target
    with pytest.raises(DtemError, match="batch size 16"):
        handle.r = "8ms@16"
    with pytest.raises(DtemError, match="cannot be reached: merging as much as possible"):
        handle.r = "9x"
    with pytest.raises(DtemError, match="takes 12 ms already"):
        handle.r = "13ms"
    with pytest.raises(DtemError, match="above 1"):
        handle.r = "0.9x"


NEW_FAMILIES = ["timm_dinov3", "rope_mixed", "perception", "hf_dinov3", "hf_siglip2", "hf_aimv2", "hf_internvl"]
NEW_FAMILIES = [name for name in [*NEW_FAMILIES, "hf_videomae"] if name in HOSTS]


@pytest.mark.parametrize("name", ["deit", "eva", "hf_dinov2", "hf_siglip", *NEW_FAMILIES])
def test_a_forward_that_begins_in_the_middle_is_the_same(name: str) -> None:
    handle = dtem.patch(fresh(name))
    divergence = Divergence(handle, [images(name, 2), images(name, 1, seed=1)])
    _, known = divergence.of((8, 0, 5, 3))
    whole, states = divergence.of((8, 0, 9, 4))
    part, later = divergence.of((8, 0, 9, 4), start=2, known=known)
    assert torch.equal(part, whole)
    assert later.before(0, 2) is None
    assert torch.equal(later.before(1, 3).x, states.before(1, 3).x)
    assert whole.shape == (3,)
    assert whole.min() > 0
    assert handle.merger.replay is None
    expected = dtem.integrations.as_logits_fn(handle.model)
    with torch.no_grad(), handle.at(r=[8, 0, 9, 4]):
        merged = expected(images(name, 1, seed=1))
    with torch.no_grad():
        unmerged = expected(images(name, 1, seed=1))
    if divergence.classifies:
        kl = torch.nn.functional.kl_div(merged.log_softmax(-1), unmerged.softmax(-1), reduction="sum")
    else:
        kl = 1 - torch.nn.functional.cosine_similarity(merged, unmerged).sum()
    assert float(whole[2]) == pytest.approx(float(kl), rel=1e-3, abs=1e-6)


class Known(Divergence):
    """Harm by a formula: merging costs least in block 2."""

    def __init__(self) -> None:
        self.batches = [torch.zeros(4, 1)]

    def of(self, plan, images=None, start=0, known=None):
        harm = sum(weight * r**1.5 for weight, r in zip((4.0, 3.0, 0.5, 5.0), plan, strict=True))
        return torch.full((4,), harm), None


def test_the_search_merges_where_it_harms_least() -> None:
    handle = dtem.patch(tiny())
    cost = lambda plan: 100.0 - sum(plan)  # noqa: E731
    search = Search(Known(), cost, handle.host, (0, 1, 2, 3))
    plan = search.run(70.0)
    assert sum(plan) == 30
    plans = [(a, b, c, 30 - a - b - c) for a in range(12) for b in range(12) for c in range(19)]
    best = min(Known().of(other)[0][0].item() for other in plans if search.clamped(other) == other)
    assert Known().of(plan)[0][0] <= 1.1 * best < 0.9 * Known().of((8, 8, 7, 7))[0][0]
    with pytest.raises(DtemError, match="no plan is that fast"):
        search.run(1.0)


def test_a_tuned_plan_is_no_worse_and_goes_with_the_adapter(tmp_path: Path) -> None:
    handle = dtem.patch(tiny())
    report = dtem.tune(handle, photographs(), "1.5x", test_data=photographs(4), progress=False)
    unmerged, even, tuned = report.rows
    assert unmerged.divergence == 0
    assert tuned.divergence <= even.divergence
    assert max(even.predicted, tuned.predicted) <= 0.012 / 1.5
    assert handle.plan == report.plan == tuned.plan
    assert tuned.test_divergence > 0
    for text in ("by block", "KL, unused images", tuned.text):
        assert text in str(report)
    assert "which is poor" not in str(report)
    assert "which is poor: it was busy" in str(dataclasses.replace(report, table_error=0.3))
    json.dumps(report.to_dict())
    handle.save_pretrained(tmp_path / "a.safetensors")
    again = dtem.from_pretrained(tmp_path / "a.safetensors", tiny(), r="tuned")
    assert again.plan == tuned.plan
    assert again.merger.tuned == handle.merger.tuned
    assert again.merger.tuned.target == "1.5x"
    again.r = 4
    again.save_pretrained(tmp_path / "b.safetensors")
    assert dtem.from_pretrained(tmp_path / "b.safetensors", tiny(), r="tuned").plan == tuned.plan


def test_a_plan_for_gflops_meets_them() -> None:
    handle = dtem.patch(tiny())
    handle.r = 6
    budget = handle.gflops(handle.plan)
    report = dtem.tune(handle, photographs(), f"{budget * 1.001!r}G", progress=False)
    assert handle.gflops(report.plan) <= budget * 1.002


def test_files_without_a_plan_and_plans_of_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = dtem.patch(tiny(), r=3)
    handle.save_pretrained(tmp_path / "old.safetensors")
    with pytest.raises(DtemError, match="there is no tuned plan"):
        dtem.from_pretrained(tmp_path / "old.safetensors", tiny(), r="tuned")
    dtem.tune(handle, photographs(), "1.5x", progress=False)
    handle.save_pretrained(tmp_path / "new.safetensors")
    monkeypatch.setattr(costs, "cpu_name", lambda: "another CPU, 64 cores")
    model = tiny()
    with pytest.warns(UserWarning, match="another CPU, 64 cores"):
        dtem.from_pretrained(tmp_path / "new.safetensors", model, r="tuned")
    right = handle.merger.tuned.to_dict()
    plans = [[1, 2], [1, 2, 3, -4], "1/2/3/4"]
    for wrong in (*({**right, "plan": plan} for plan in plans), {**right, "batch": "1"}, {"plan": []}, 7):
        with pytest.raises(DtemError, match="tuned plan in the header is damaged"):
            costs_plan(wrong)


def costs_plan(values: object) -> object:
    from dtem.measure.tuned import TunedPlan

    return TunedPlan.from_dict(values, 4)


def test_a_curve_pairs_constant_r_with_plans_of_its_time(tmp_path: Path) -> None:
    handle = dtem.patch(tiny(), r=2)
    report = dtem.tune(handle, photographs(8), curve=True, progress=False)
    assert [row.name for row in report.rows] == ["unmerged", *["constant", "tuned"] * len(tune.CURVE)]
    for even, tuned in zip(report.rows[1::2], report.rows[2::2], strict=True):
        assert tuned.predicted <= even.predicted
        assert tuned.divergence <= even.divergence
    assert handle.plan == (2, 2, 2, 2)
    assert handle.merger.tuned is None
    report.save_plot(tmp_path / "curve.svg")
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "20ms"}, "meets the target already"),
        ({"target": "13"}, "target = '13' is not a cost"),
        ({"target": "1.5x", "data": None}, "give data"),
        ({"target": "1.5x", "engine": "compile"}, "compile again for every plan"),
        ({"target": "1.5x", "dtype": "bfloat16"}, "convert it first"),
        ({"target": "1.5x@8"}, "is for batch size 8"),
        ({"target": "1.5x", "curve": True}, "leave one of them out"),
        ({"target": "1.5x", "data": []}, "at least one"),
        ({"threads": 0}, "threads = 0"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    handle = dtem.patch(tiny())
    with pytest.raises(DtemError, match=message):
        dtem.tune(handle, **{"data": photographs(2), "progress": False, **options})


def test_the_verb_measures_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["tune", "--model", "test_vit", "--random-weights", "--json", "--out", str(tmp_path / "r.json")]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == []
    assert set(document["constant_milliseconds"]) == {str(r) for r in tune.CURVE}
    assert dtem.load_record(tmp_path / "r.json").kind == "tune"
