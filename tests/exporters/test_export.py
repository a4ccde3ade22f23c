"""Files for other runtimes: what they compute, at batches that the trace never saw, and what they say of themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import dtem
from dtem.errors import DtemError
from dtem.exporters import check, export

pytest.importorskip("onnxscript", reason='needs pip install ".[export]"')
pytest.importorskip("openvino", reason='needs pip install ".[openvino]"')

CASES = ["onnx-distilled-dtem", "openvino-mae-tome", "onnx-hf_dinov2-dtem", "torch-hf_siglip2-dtem"]
MORE = [
    "openvino-hf_clip-tome",
    "torch-hf_siglip-dtem",
    "onnx-hf_deit-dtem",
    "onnx-hf_vit-tome",
    "onnx-siglip-dtem",
    "torch-dinov2_registers-dtem",
    "onnx-deit-evit",
    "onnx-non_square-dtem",
    "torch-siglip-tome",
    "openvino-deit3-dtem",
    "onnx-eva-dtem",
    "torch-rope_mixed-dtem",
    "onnx-timm_dinov3-tome",
    "torch-perception-dtem",
    "onnx-hf_dinov3-dtem",
    "onnx-hf_siglip2-tome",
    "onnx-hf_aimv2-dtem",
    "torch-hf_aimv2-tome",
    "openvino-hf_internvl-dtem",
    "onnx-hf_videomae-dtem",
    "openvino-hf_videomae-tome",
]
HEADLESS = ("hf_clip", "hf_siglip", "hf_siglip2", "hf_dinov3", "hf_aimv2", "hf_internvl")
ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]
EVERYWHERE = [
    "Add",
    "ArgMax",
    "Cast",
    "Clip",
    "Concat",
    "Constant",
    "Conv",
    "Div",
    "Equal",
    "Erf",
    "Expand",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gemm",
    "Identity",
    "LayerNormalization",
    "Log",
    "LpNormalization",
    "MatMul",
    "Mul",
    "Pad",
    "Range",
    "Reciprocal",
    "ReduceL2",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "ScatterND",
    "Shape",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "Sub",
    "Tanh",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
]


@pytest.fixture(scope="module")
def report(request):
    """What came of every case; the slow ones are exported only if they were asked for."""
    selected = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    script = Path(__file__).with_name("exported.py")
    done = subprocess.run(
        [sys.executable, script, *(case for case in [*CASES, *MORE] if case in selected)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ALL)
def test_the_file_computes_what_the_model_computes(report, case):
    result = report[case]
    assert "error" not in result, result["error"]
    for batch, difference in result["differences"].items():
        assert difference < 1e-4, f"batch {batch}"


@pytest.mark.parametrize("case", ALL)
def test_the_file_says_what_it_is(report, case):
    held = report[case]["metadata"]
    form, name, method = case.split("-")
    assert held["r"] == "9"
    assert json.loads(held["plan"]) == [9, 9]
    assert held["method"] == method
    assert ("labels" in held) != (name in HEADLESS), "towers without a classifier have no classes"
    assert json.loads(held.get("labels", "[]")) in ([], [f"class {number}" for number in range(5)])
    known = ("deit", "vit", "eva", "dinov", "siglip", "clip", "aimv2", "internvl", "videomae")
    assert held["host"].lower().startswith(known)
    assert ("mean" in held) != name.startswith("hf"), "what transformers keeps in a processor is not made up"
    ends = {"onnx": [".onnx"], "openvino": [".bin", ".xml"], "torch": [".pt2"]}[form]
    assert report[case]["files"] == [f"{name}-{method}{end}" for end in ends]


@pytest.mark.parametrize("case", ["onnx-distilled-dtem"])
def test_int8_runs_and_is_near(report, case):
    """With its weights by head, which stay as they are: two prefix tokens ask in the last block."""
    assert 0 < report[case]["quantised"] < 0.1


@pytest.mark.parametrize("case", ["onnx-distilled-dtem"])
def test_biases_after_norms_are_folded(report, case):
    """Of both blocks; but not where the class tokens of the last one ask the normalised tokens themselves."""
    assert report[case]["folded"] == 3


@pytest.mark.parametrize("case", ["onnx-distilled-dtem", "openvino-mae-tome"])
def test_operators_are_those_that_every_runtime_has(report, case):
    operators = set(report[case]["operators"])
    assert not operators.difference(EVERYWHERE)
    assert "TopK" in operators
    assert "ScatterND" in operators, "a merge is not in the form that was written for files"


def tiny() -> torch.nn.Module:
    return timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=1, num_classes=3
    ).eval()


@pytest.mark.parametrize(
    ("name", "form", "options", "says"),
    [
        ("a.onnx", "coreml", {}, "'coreml' is not known"),
        ("a.pt", "torch", {}, "must end in .pt2"),
        ("a.pt2", "torch", {"int8": True}, "int8 requires format onnx or openvino"),
        ("a.xml", "openvino", {"int8": True, "data": None}, "give them as data"),
        ("no/a.onnx", "onnx", {}, "there is no folder"),
        ("a.onnx", "onnx", {"labels": ["cat"]}, "1 labels, and the model 3 classes"),
    ],
)
def test_what_is_refused(name, form, options, says, tmp_path) -> None:
    handle = dtem.patch(tiny(), r=2)
    with pytest.raises(DtemError, match=says):
        dtem.export(handle, tmp_path / name, format=form, **{"data": [torch.zeros(1, 3, 32, 32)], **options})
    assert list(tmp_path.iterdir()) == []


def test_random_weights_are_called_so(tmp_path) -> None:
    command = [sys.executable, "-m", "dtem.cli", "export", "--model", "test_vit", "--random-weights", "--r", "4"]
    command += ["--json", "--out", str(tmp_path / "a.pt2"), "--limit", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["random_weights"]
    assert document["metadata"]["weights"] == "random"
    assert not document["labels"], "names of classes would be made up"


def test_a_captioner_is_not_exported(tmp_path) -> None:
    from integrations.gits import tiny_git

    with pytest.raises(DtemError, match="generates text"):
        dtem.export(dtem.patch(tiny_git(), r=2), tmp_path / "a.pt2")


def test_vision_language_models_are_neither_exported_nor_tuned(tmp_path) -> None:
    from integrations.vlms import tiny_vlm

    model = tiny_vlm("llava")
    with pytest.raises(DtemError, match="generates text"):
        dtem.export(dtem.patch(model, r=2), tmp_path / "a.pt2")
    with pytest.raises(DtemError, match="answers questions"):
        dtem.tune(dtem.Handle(model), [torch.zeros(1, 3, 32, 32)], "1.2x")


def test_models_that_are_not_float32_are_not_exported(tmp_path) -> None:
    handle = dtem.patch(tiny().bfloat16(), r=2)
    with pytest.raises(DtemError, match=r"not torch\.bfloat16 on cpu"):
        dtem.export(handle, tmp_path / "a.onnx", data=[torch.zeros(1, 3, 32, 32)])


def test_torchs_own_exporter_takes_the_translations(tmp_path) -> None:
    from dtem.exporters import onnx, operators

    model = tiny().eval()
    dtem.patch(model, r=2)
    images = torch.randn(2, 3, 32, 32)
    table = operators.table()
    torch.onnx.export(
        model,
        (images,),
        tmp_path / "a.onnx",
        dynamo=True,
        input_names=[onnx.INPUT],
        output_names=[onnx.OUTPUT],
        custom_translation_table=table,
        verbose=False,
    )
    with torch.no_grad():
        torch.testing.assert_close(onnx.runner(tmp_path / "a.onnx")(images), model(images), rtol=1e-4, atol=1e-5)


def test_soft_merging_is_no_file(tmp_path) -> None:
    handle = dtem.patch(tiny(), r=2)
    handle.mode = "soft"
    with pytest.raises(DtemError, match="hard merging"):
        dtem.export(handle, tmp_path / "a.onnx", data=[torch.zeros(1, 3, 32, 32)])


def test_a_file_that_computes_something_else_gets_no_name(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check fails, and an older file of that name stays."""
    handle = dtem.patch(tiny(), r=2)
    monkeypatch.setattr(export.program, "trace", lambda model, image: None)
    monkeypatch.setattr(export.onnx, "save", lambda traced, path, held, fold: path.write_bytes(b"new"))
    monkeypatch.setattr(export.onnx, "operator_counts", lambda path: {})
    monkeypatch.setattr(export.onnx, "runner", lambda path: lambda images: torch.ones(len(images), 3) * 100)
    (tmp_path / "a.onnx").write_bytes(b"old")
    with pytest.raises(DtemError, match="0 of 2 images agree"):
        dtem.export(handle, tmp_path / "a.onnx", data=[torch.randn(2, 3, 32, 32)])
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
    assert (tmp_path / "a.onnx").read_bytes() == b"old"


@pytest.mark.parametrize(("r", "int8", "folded"), [(2, False, True), (0, False, False), (2, True, False)])
def test_whose_biases_are_folded(r, int8, folded, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmerged file is the host as it is; int8 wants activations as the model has them."""
    handle = dtem.patch(tiny(), r=r)
    folds = []
    monkeypatch.setattr(export.program, "trace", lambda model, image: None)
    monkeypatch.setattr(export.onnx, "save", lambda traced, path, held, fold: [folds.append(fold), path.touch()])
    monkeypatch.setattr(export.onnx, "quantise", lambda path, out: None)
    monkeypatch.setattr(export.onnx, "operator_counts", lambda path: {})
    monkeypatch.setattr(export.onnx, "runner", lambda path: handle.model)
    dtem.export(handle, tmp_path / "a.onnx", data=[torch.randn(2, 3, 32, 32)], int8=int8)
    assert folds == [folded]


def test_agreement_counts_by_hand() -> None:
    expected = torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 100.0]])
    logits = torch.tensor([[0.0, 2.001], [1.0, 1.5], [0.05, 100.0]])
    rows = iter([logits[:1], logits[1:]])  # the file is asked for one image, then for the rest
    result = check.agreement(lambda images: expected, lambda images: next(rows), [torch.zeros(3, 1)])
    assert result.images == 3
    assert result.largest == 2.0
    assert result.typical == pytest.approx(0.05)
    assert result.agreeing == 2  # 0.001 of 2 and 0.05 of 100
    assert result.same_class == 2


def test_nan_never_agrees() -> None:
    result = check.agreement(
        lambda x: torch.zeros(2, 3), lambda x: torch.full((len(x), 3), torch.nan), [torch.zeros(2)]
    )
    assert result.agreeing == 0
    with pytest.raises(DtemError, match="computes something other than the model"):
        check.require_agreement(result, "onnx")


@pytest.mark.slow
@pytest.mark.parametrize("r", [13, 16])
def test_deit_small_at_its_own_size(r: int, tmp_path, capsys) -> None:
    """The command itself, in a process of its own, and int8 beside it."""
    for more in ([], ["--int8"]):
        command = ["export", "--model", "deit_small_patch16_224", "--random-weights", "--r", str(r), "--limit", "4"]
        command = [sys.executable, "-m", "dtem.cli", *command, "--json", "--out", str(tmp_path / "a.onnx"), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["random_weights"]
        assert document["metadata"]["host"] == "deit_small_patch16_224"
        if not more:
            assert document["agreement"]["largest"] < 1e-4
            whole = document["bytes"]
    assert document["bytes"] < 0.4 * whole
    assert "MatMulInteger" in document["operators"]


def test_norms_of_an_adapter_become_weights(tmp_path: Path) -> None:
    """The file has the operators of one without them, and computes what the patched model does."""
    reports = {}
    for norms in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=5).eval()
        handle = dtem.patch(model, "tome", r=9, norms=norms, biases=norms)
        if norms:
            before = {name: part.clone() for name, part in model.state_dict().items()}
            with torch.no_grad():
                for parameter in handle.method.affine.parameters():
                    parameter.normal_(0.0, 0.3)
        reports[norms] = dtem.export(handle, tmp_path / f"{norms}.onnx")
    assert reports[True].operators == reports[False].operators
    assert reports[True].agreement.largest < 1e-3
    assert handle.method.affine is not None
    handle.state_dict()  # stored: the host's state dict, which leaves it out, warns no more
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
