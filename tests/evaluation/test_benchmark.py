"""`dtem.benchmark`: which models are timed, and that nothing of the caller's changes."""

import pytest
import timm
import torch

import dtem
from dtem.errors import DtemError
from dtem.evaluation import oracle
from dtem.measure import flops, throughput

QUICK = {"batch_size": 2, "rounds": 1, "warmup": 0, "progress": False}


def tiny() -> torch.nn.Module:
    return timm.create_model("test_vit").eval()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.nn.Module]:
    """The models that were timed, by name."""
    models: dict[str, torch.nn.Module] = {}
    compare = throughput.compare

    def spy(variants, *args, **options):
        models.update(variants)
        return compare(variants, *args, **options)

    monkeypatch.setattr(throughput, "compare", spy)
    return models


def test_a_model_stays_as_it_was(timed: dict[str, torch.nn.Module]) -> None:
    model, threads = tiny().train(), torch.get_num_threads()
    report = dtem.benchmark(model, [0, 8], method="tome", dtype="bfloat16", threads=1, **QUICK)
    assert model.training
    assert not hasattr(model, "dtem")
    assert next(model.parameters()).dtype == torch.float32
    assert torch.get_num_threads() == threads
    assert (report.model, report.method, report.threads, report.dtype) == ("test_vit", "tome", 1, "bfloat16")
    assert list(timed) == ["unmerged", "0", "8"]
    assert [hasattr(each, "dtem") for each in timed.values()] == [False, True, True]
    assert {next(each.parameters()).dtype for each in timed.values()} == {torch.bfloat16}
    assert not any(each.training for each in timed.values())


def test_a_handle_brings_its_method_and_embeddings(timed: dict[str, torch.nn.Module]) -> None:
    handle = dtem.patch(tiny(), dim=8, r=4)
    handle.mode = "soft"
    report = dtem.benchmark(handle, [8], **QUICK)
    assert (handle.r, handle.mode) == (4, "soft")
    assert report.method == "dtem"
    merged = dtem.Handle(timed["8"])
    assert (merged.r, merged.mode) == ("8", "hard")
    assert merged.method.state_dict().keys() == handle.method.state_dict().keys()
    assert not hasattr(timed["unmerged"], "dtem")
    assert [row.macs for row in report.rows] == [flops.count(each, (3, 160, 160)).macs for each in timed.values()]


def test_report_has_a_table_and_a_document() -> None:
    report = dtem.benchmark("test_vit", 8, pretrained=False, **{**QUICK, "batch_size": [1, 2, 1]})
    assert [(row.batch, row.r) for row in report.rows] == [(1, None), (1, "8"), (2, None), (2, "8")]
    document = report.to_dict()
    assert list(document) == [
        "model", "method", "adapter", "device", "dtype", "engine", "shortcut", "threads", "rounds", "rows",
    ]  # fmt: skip
    assert set(document["rows"][0]) == {
        "batch", "r", "macs", "macs_ratio", "images_per_second", "seconds", "speedup", "oracle_seconds",
        "of_oracle", "peak_bytes",
    }  # fmt: skip
    assert set(document["rows"][0]["speedup"]) == {"median", "low", "high", "min", "max"}
    assert "unmerged" in str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": []}, "batch_size = "),
        ({"rounds": 0}, "rounds = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"dtype": "half"}, "engine eager has no half"),
        ({"engine": "tflite"}, "engine = 'tflite' is not known"),
        ({"engine": "onnx", "dtype": "bfloat16"}, "engine onnx has no bfloat16"),
        ({"r": "eight"}, "r = 'eight'"),
        ({"method": "tomato"}, "'tomato' is not known"),
    ],
)
def test_mistakes_are_named_before_a_model_is_built(
    options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *_args, **_options: pytest.fail("the model was built"))
    with pytest.raises(DtemError, match=message):
        dtem.benchmark("test_vit", **{**QUICK, **options})


def test_the_oracle_keeps_as_many_tokens_without_choosing(timed: dict[str, torch.nn.Module]) -> None:
    report = dtem.benchmark(tiny(), ["4", "8@-0.5"], oracle=True, shortcut=True, **{**QUICK, "batch_size": [1, 2]})
    for spec in ("4", "8@-0.5"):
        merged, oracle = dtem.Handle(timed[spec]), dtem.Handle(timed[f"oracle {spec}"])
        assert oracle.tokens == merged.tokens
        assert oracle.merger.shortcut
        assert not list(oracle.method.parameters())
        assert "dtem.embeddings" not in str(oracle.model)
    assert [row.r for row in report.rows] == [None, "4", "8@-0.5"] * 2
    for row in report.rows:
        assert (row.of_oracle is None) == (row.oracle_seconds is None) == (row.r is None)
    assert "of the oracle" in str(report)
    assert "of the oracle" not in str(dtem.benchmark(tiny(), 4, **QUICK))


def test_the_oracle_keeps_the_prefix_and_spreads_the_rest() -> None:
    kept = oracle._kept(13, 4, 2, torch.device("cpu")).tolist()
    assert kept[:2] == [0, 1]
    assert len(set(kept)) == 9
    assert kept == sorted(kept)
    assert max(kept) <= 12
    assert oracle._kept(3, 1, 2, torch.device("cpu")).tolist() == [0, 1]


def test_an_oracle_can_be_exported_and_runs_afterwards() -> None:
    """It keeps nothing that was made while it was traced, and a graph holds what was made before."""
    dropping, images = oracle.as_oracle(dtem.patch(tiny(), r=5)).model, torch.randn(2, 3, 160, 160)
    oracle._kept_once.cache_clear()
    with torch.no_grad():
        graph = torch.export.export(dropping, (images,)).module()
        expected = dropping(images)
        assert torch.equal(torch.export.export(dropping, (images,)).module()(images), graph(images))
    torch.testing.assert_close(graph(images), expected)


def test_the_oracle_of_an_adapter_with_norms_is_the_plain_host() -> None:
    handle = dtem.patch(tiny(), norms=True, r=4)
    dropping = oracle.as_oracle(handle)
    assert dropping.tokens == handle.tokens
    assert not any("Tuned" in type(module).__name__ for module in dropping.model.modules())


@pytest.mark.parametrize("method", ["ats", "dynamicvit", "evo_vit"])
def test_methods_that_do_more_than_drop_have_no_oracle(method: str) -> None:
    with pytest.raises(DtemError, match=f"{method}.* does more than that"):
        dtem.benchmark(tiny(), 0, method=method, oracle=True, **QUICK)
