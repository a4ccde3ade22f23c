"""Every verb on a tiny model: one JSON document, a readable table, and mistakes that explain themselves."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem
from data.photo_folders import class_folders
from dtem import integrations
from dtem.cli import VERBS, main
from dtem.evaluation.model_overview import PRESETS
from dtem.measure import flops, record
from tasks.captioning.small import write_captioner

TINY = ["--model", "test_vit", "--random-weights"]
QUICK = {
    "flops": ["flops", "--model", "test_vit", "--r", "0,8"],
    "bench": ["bench", *TINY, "--r", "0,8", "--batch-size", "1,2", "--rounds", "2", "--warmup", "0"],
    "models": ["models"],
    "adapters": ["adapters"],
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run a command that must succeed; returns its stdout."""

    def command(*argv: str) -> str:
        code = main(argv)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return command


DATA = ["--data", "photos", "--batch-size", "4"]
EVERY = QUICK | {
    "train": ["train", *TINY, *DATA, "--loss", "distill", "--epochs", "1", "--workers", "0", "--out", "run"],
    "eval": ["eval", *TINY, *DATA, "--r", "8"],
    "compare": ["compare", *TINY, *DATA, "--gflops", "0.03", "--method", "tome", "--rounds", "1"],
    "predict": ["predict", "photos", *TINY, "--r", "8", "--out", "p.parquet"],
    "export": ["export", *TINY, "--r", "0", "--out", "a.pt2"],  # shape checks of the tests cannot be exported
    "show": ["show", "photos/0/000.png", *TINY, "--r", "8"],
    "caption": ["caption", "photos/0/000.png", "--model", "git", "--r", "3", "--max-new-tokens", "2"],
    "average": ["average", "a.safetensors", "b.safetensors", "--out", "mean.safetensors"],
}
LONG = {"app", "ask", "demo", "tune"}  # a server, another model, minutes of training, measured costs: their own tests


def test_every_verb_is_tested() -> None:
    assert {*EVERY, *LONG} == set(VERBS)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, two adapters and a captioner."""
    folder = tmp_path_factory.mktemp("workspace")
    class_folders(folder / "photos", 8)
    write_captioner(folder / "git")
    for name in "ab":
        dtem.patch(timm.create_model("test_vit"), r=8).save_pretrained(folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("verb", EVERY)
def test_json_is_one_document(verb: str, run, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    assert isinstance(json.loads(run(*EVERY[verb], "--json")), dict)


METHOD_VERBS = {
    "flops": [],
    "bench": [],
    "export": ["--format", "onnx", "--out", "a.onnx"],
    "predict": [".", "--out", "a.parquet"],
    "compare": ["--data", ".", "--gflops", "0.1"],
    "eval": ["--data", "."],
    "train": ["--data", ".", "--out", "run"],
    "show": ["a.png"],
    "caption": ["a.png"],
}


@pytest.mark.parametrize("verb", METHOD_VERBS)
def test_methods_are_checked_before_weights_are_fetched(
    verb: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 40)).save("a.png")
    monkeypatch.setattr(timm, "create_model", lambda *_args, **_options: pytest.fail("the model was built"))
    monkeypatch.setattr("dtem.models.hub.create", lambda *_args, **_options: pytest.fail("the model was built"))
    model = "microsoft/git-base-coco" if verb == "caption" else "test_vit"
    assert main([verb, *METHOD_VERBS[verb], "--model", model, "--method", "nothing"]) == 2
    assert "method 'nothing' is not known; choose one of: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        ("flops", ["GFLOPs (MACs)", "GFLOPs (paper)", "parameters added", "8 ×6"]),
        ("bench", ["unmerged", "speed-up", "(quartiles)", "peak", "im/s"]),
        ("models", ["MAE-L", "vit_small_patch16_384", "(paper)"]),
    ],
)
def test_tables(verb: str, shown: list[str], run) -> None:
    out = run(*QUICK[verb])
    for text in shown:
        assert text in out


def test_one_model_of_every_family_is_listed(run) -> None:
    document = json.loads(run("models", "--json"))
    listed = {model["name"]: model for model in [*document["models"], *document["others"]]}
    siglip, deit = listed["SiglipVisionModel"], listed["DeiTForImageClassificationWithTeacher"]
    assert (siglip["tokens"], siglip["prefix"], siglip["pooling"]) == (196, 0, "attention")
    assert (deit["tokens"], deit["prefix"], deit["pooling"]) == (198, 2, "prefix")
    assert listed["vit_small_r26_s32_224"]["tokens"] == 50
    assert all(model["merged_macs"] < model["macs"] for model in listed.values())
    classes = 768 * (1000 - 2)  # transformers' ViT-B is DeiT-B with two classes
    assert listed["ViTForImageClassification"]["macs"] == listed["deit_base_patch16_224"]["macs"] - classes
    assert {family["name"] for family in document["families"]} >= {
        "timm_vit",
        "timm_eva",
        "hf_vit",
        "hf_clip",
        "hf_siglip",
    }


def test_flops_are_those_of_the_handle(run) -> None:
    document = json.loads(run("flops", "--model", "test_vit", "--method", "tome", "--r", "0, 8,20%,0.03G,8", "--json"))
    handle = dtem.patch(timm.create_model("test_vit"), method="tome")
    assert [row["r"] for row in document["rows"]] == ["0", "8", "20%", "0.03G"]
    assert document["parameters_added"] == 0
    for row in document["rows"]:
        handle.r = row["r"]
        count = flops.count(handle.model, handle.host.image)
        assert (row["macs"], row["paper"]) == (count.macs, count.paper)
        assert row["plan"] == list(handle.plan)
        assert row["tokens"] == handle.tokens[-1]
    unmerged, merged = document["rows"][:2]
    assert unmerged["macs_reduction_percent"] == 0
    assert merged["macs_reduction_percent"] == pytest.approx(100 * (1 - merged["macs"] / unmerged["macs"]))


def test_flops_count_the_parameters_of_an_adapter(run, tmp_path) -> None:
    handle = dtem.patch(timm.create_model("test_vit"), dim=8, r=8)
    dtem.save_pretrained(handle, tmp_path / "a.safetensors")
    document = json.loads(
        run("flops", "--model", "test_vit", "--adapter", str(tmp_path / "a.safetensors"), "--r", "8", "--json")
    )
    assert document["parameters_added"] == sum(p.numel() for p in handle.method.parameters())
    assert document["rows"][0]["macs"] == flops.count(handle.model, handle.host.image).macs


def test_options_reach_the_model(run) -> None:
    argv = ["flops", "--model", "test_vit", "--img-size", "64x96", "--global-pool", "avg", "--r", "4", "--json"]
    document = json.loads(run(*argv))
    handle = dtem.patch(timm.create_model("test_vit", img_size=(64, 96), global_pool="avg"), r=4)
    assert document["image"] == [3, 64, 96]
    assert document["rows"][0]["macs"] == flops.count(handle.model, handle.host.image).macs


def test_the_shortcut_counts_less(run) -> None:
    full, short = (
        json.loads(run("flops", "--model", "test_vit", "--r", "8", "--json", *more))["rows"][0]["macs"]
        for more in ([], ["--shortcut"])
    )
    assert short < full


def test_bench_rows_and_record(run, tmp_path) -> None:
    out = tmp_path / "bench.json"
    document = json.loads(run(*QUICK["bench"], "--json", "--seed", "3", "--out", str(out)))
    assert [(row["batch"], row["r"]) for row in document["rows"]] == [
        (size, r) for size in (1, 2) for r in (None, "0", "8")
    ]
    for row in document["rows"]:
        ratio = row["speedup"]
        assert 0 < ratio["min"] <= ratio["low"] <= ratio["median"] <= ratio["high"] <= ratio["max"]
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["seconds"])
        assert row["peak_bytes"] > 0
    unmerged, same, merged = document["rows"][:3]
    assert unmerged["speedup"]["median"] == unmerged["macs_ratio"] == same["macs_ratio"] == 1
    assert merged["macs_ratio"] > 1
    stored = record.load_record(out)
    assert stored.results == document
    assert (stored.kind, stored.seed) == ("bench", 3)
    assert stored.command[:2] == ["dtem", "bench"]
    assert str(tmp_path) not in out.read_text()


def test_bench_never_patches_the_baseline(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtem.measure import throughput

    seen = {}
    plain = throughput.compare

    def spy(variants, *args, **kwargs):
        seen.update({name: hasattr(model, "dtem") for name, model in variants.items()})
        return plain(variants, *args, **kwargs)

    monkeypatch.setattr(throughput, "compare", spy)
    run(*QUICK["bench"])
    assert seen == {"unmerged": False, "0": True, "8": True}


def test_bench_in_half_precision(run) -> None:
    full, half = (
        json.loads(run(*QUICK["bench"], "--json", "--dtype", dtype))["rows"][0] for dtype in ("float32", "bfloat16")
    )
    assert half["peak_bytes"] < full["peak_bytes"]


def test_bench_with_weights(run, tmp_path) -> None:
    host = timm.create_model("test_vit", num_classes=7, global_pool="avg")
    save_file(host.state_dict(), tmp_path / "w.safetensors")
    argv = [arg for arg in QUICK["bench"] if arg != "--random-weights"]
    argv += ["--json", "--weights", str(tmp_path / "w.safetensors"), "--global-pool", "avg", "--num-classes", "7"]
    assert len(json.loads(run(*argv))["rows"]) == 6


def test_models_that_match_a_pattern(run) -> None:
    assert run("models", "deit_*_patch16_224").split() == dtem.list_models("deit_*_patch16_224")
    assert json.loads(run("models", "lvvit*", "--json")) == {"models": ["lvvit_s"]}
    assert run("models", "zzz*") == "no supported model matches zzz*\n"


def test_models_are_the_papers(run) -> None:
    document = json.loads(run("models", "--json"))
    assert [family["name"] for family in document["families"]] == list(integrations.INTEGRATIONS)
    by_title = {model["title"]: model for model in document["models"]}
    assert list(by_title) == [preset.title for preset in PRESETS]
    large = by_title["AugReg ViT-S 384"]
    assert (large["tokens"], large["prefix"], large["r"]) == (577, 1, 48)
    assert large["paper"] / 1e9 == pytest.approx(15.7, rel=0.01)
    assert large["merged_paper"] / 1e9 == pytest.approx(7.54, rel=0.01)
    assert by_title["MAE-L"]["pool"] == "avg"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["flops", "--model", "deit_smal_patch16_224"],
            ["'deit_smal_patch16_224'", "did you mean deit_small_patch16_224"],
        ),
        (["flops", "--model", "zzzzzzzz"], ["'zzzzzzzz'", "list_models"]),
        (["flops", "--model", "deit_tiny_patch16_224.nothing"], ["nothing"]),
        (["flops", "--model", "test_resnet"], ["ResNet is not supported", "deit_"]),
        (["flops", "--model", "test_vit", "--method", "tomato"], ["'tomato'", "choose one of", "dtem,", "tome"]),
        (["flops", "--model", "test_vit", "--r", "8,,16"], ["--r ''"]),
        (["flops", "--model", "test_vit", "--r", "-4"], ["-4"]),
        (["flops", "--model", "test_vit", "--r", "500"], ["500"]),
        (["flops", "--model", "test_vit", "--r", "eight"], ["--r eight"]),
        (["flops", "--model", "test_vit", "--img-size", "big"], ["--img-size big"]),
        (["flops", "--model", "test_vit", "--img-size", "150"], ["150x150", "patch size, 16"]),
        (["flops", "--model", "test_vit", "--adapter", "nowhere.safetensors"], ["nowhere.safetensors"]),
        (["flops", "--model", "test_vit", "--adapter", "a", "--method", "tome"], ["--method tome"]),
        (["bench", *TINY, "--batch-size", "0"], ["--batch-size 0"]),
        (["bench", *TINY, "--rounds", "0", "--batch-size", "1"], ["--rounds 0"]),
        (["bench", *TINY, "--threads", "0"], ["--threads 0"]),
        (["bench", "--model", "test_vit", "--weights", "nowhere.pth"], ["nowhere.pth"]),
        (["bench", *TINY, "--weights", "a.pth"], ["--weights and --random-weights"]),
    ],
    ids=lambda value: " ".join(value[1:]) if value[0] in VERBS else None,
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_mistakes_explain_themselves(argv: list[str], says: list[str], more: list[str], capsys) -> None:
    assert main([*argv, *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    for text in says:
        assert text in printed.err


def test_no_cuda_is_a_mistake(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *TINY, "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_an_unwritable_record_does_not_cost_the_numbers(capsys, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert main([*QUICK["bench"], "--json", "--out", str(tmp_path / "file" / "x.json")]) == 2
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 6
    assert "cannot write the record" in printed.err


def test_the_progress_bar_stays_off_stdout(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([*QUICK["bench"], "--json"]) == 0
    printed = capsys.readouterr()
    assert "timing" in printed.err
    assert len(json.loads(printed.out)["rows"]) == 6
