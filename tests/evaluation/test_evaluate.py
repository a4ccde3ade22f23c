"""`dtem.evaluate` and `dtem.compare` from Python, on a tiny random model and generated images."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn

import dtem
from dtem.data import sources
from dtem.errors import DtemError
from dtem.evaluation.classification import compare_outcomes
from dtem.evaluation.compare import comparable_methods
from dtem.models.segmenter import create as create_segmenter
from dtem.tasks import task_of

MODEL = "test_vit"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(MODEL, num_classes=3)
    with torch.no_grad():  # timm starts near zero: every image would get the same prediction
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        (root / str(number % 3)).mkdir(exist_ok=True)
        pixels = torch.randint(256, (20, 20, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).resize((180, 180)).save(root / str(number % 3) / f"{number}.png")
    return root


def test_a_model_stays_as_it_was(model: nn.Module, images: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = dtem.evaluate(model.train(), images, r=8, progress=False)
    assert [(row.method, row.r) for row in report.rows] == [("unmerged", "0"), ("tome", "8")]
    assert (report.images, report.task, list(report.outcomes)) == (6, "classification", ["unmerged", "tome-r8"])
    assert model.training
    assert not hasattr(model, "dtem")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_handle_is_one_of_the_variants(model: nn.Module, images: Path) -> None:
    plain = dtem.evaluate(model, images, r=8, methods=["tome"], progress=False)
    torch.manual_seed(1)
    handle = dtem.patch(model, r=5, init="random")
    handle.mode = "soft"
    report = dtem.evaluate(handle, sources.open_source(str(images)), r=[8], methods=["tome", "dtem"], progress=False)
    rows = {row.method: row for row in report.rows}
    assert list(rows) == ["unmerged", "tome", "dtem"]
    for name, row in {row.method: row for row in plain.rows}.items():
        assert rows[name].cross_entropy == pytest.approx(row.cross_entropy, rel=1e-5)
    assert rows["dtem"].cross_entropy != rows["tome"].cross_entropy
    assert (handle.r, handle.mode) == (5, "soft")
    own = dtem.evaluate(handle.model, images, r=8, methods=(), progress=False)
    assert own.rows[1].cross_entropy == pytest.approx(rows["dtem"].cross_entropy, rel=1e-5)


def test_a_report_is_short_in_a_prompt_and_a_table_in_a_notebook(model: nn.Module, images: Path, tmp_path) -> None:
    report = dtem.evaluate(model, images, r="4,8", progress=False)
    assert repr(report) == f"<ClassificationReport: {report.title}, 3 variants, 6 images>"
    assert "<table>" in report._repr_html_()
    text = str(report)
    assert "points against" in text
    assert "excluded" not in text  # zero is no news
    json.dumps(report.to_dict(), allow_nan=False)
    report.save_plot(tmp_path / "curve.svg")
    assert ">r=8</text>" in (tmp_path / "curve.svg").read_text()


def test_learned_rates_run_beside_a_method_that_has_none(model: nn.Module, images: Path, tmp_path: Path) -> None:
    handle = dtem.patch(timm.create_model(MODEL, num_classes=3), "diffrate")
    handle.save_pretrained(tmp_path / "rates.safetensors")
    report = dtem.evaluate(model, images, "learned,8", adapters=tmp_path / "rates.safetensors", progress=False)
    variants = [(row.method, row.r) for row in report.rows]
    assert ("tome", "8") in variants
    assert ("tome", "learned") not in variants
    with pytest.raises(DtemError, match="no schedule was learned by tome"):
        dtem.evaluate(model, images, "learned", progress=False)


def test_features_by_nearest_neighbours(model: nn.Module, images: Path) -> None:
    report = dtem.evaluate(model, images, 8, knn=str(images), num_neighbours=1, progress=False)
    assert [row.top1 for row in report.rows] == [100, 100]  # every image is its own neighbour
    assert model.num_classes == 3
    with pytest.raises(DtemError, match="num_classes=0"):
        dtem.evaluate(dtem.patch(model), images, 8, knn=str(images), progress=False)


def test_outcomes_are_compared_by_file(model: nn.Module, images: Path, tmp_path: Path) -> None:
    report = dtem.evaluate(model, images, 8, methods="tome,evit", out=tmp_path, progress=False)
    comparison = compare_outcomes(tmp_path / "tome-r8.safetensors", tmp_path / "evit-r8.safetensors")
    assert comparison.paired == report.against_tome["evit", "8"]
    assert "evit-r8 against tome-r8" in str(comparison)
    assert dtem.load_record(tmp_path / "record.json").results == report.to_dict()


def test_a_comparison_of_a_handle_at_one_budget(model: nn.Module, images: Path) -> None:
    full = dtem.evaluate(model, images, 8, methods=(), progress=False).rows[0].macs / 1e9
    handle = dtem.patch(model, r=5)
    report = dtem.compare(handle, images, 0.8 * full, methods="tome", timed_batch_size=(), progress=False)
    assert [row.method for row in report.evaluation.rows] == ["unmerged", "tome", "dtem"]
    assert report.costs[0].off_budget is None
    assert all(abs(cost.off_budget) < 0.05 for cost in report.costs[1:])
    assert repr(report).startswith("<ComparisonReport: ")


def test_methods_with_trained_parts_need_an_adapter(model: nn.Module) -> None:
    names, reasons = comparable_methods(model, {"dtem"})
    assert names[0] == "tome"
    assert "evit" in names
    assert reasons["dynamicvit"] == "it has trained parts: give its adapter, dynamicvit=FILE"
    assert "dtem" not in {*names, *reasons}  # its adapter takes part
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_mistakes_are_named_before_weights_are_downloaded(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: pytest.fail("a model was built"))
    for function in (dtem.evaluate, dtem.compare):
        with pytest.raises(DtemError, match="'tomato'"):
            function("deit_tiny_patch16_224", images, methods="tomato")
        with pytest.raises(DtemError, match=r"dtype = 'fp32'"):
            function("deit_tiny_patch16_224", images, dtype="fp32")
    with pytest.raises(DtemError, match="no variant for dense prediction"):
        dtem.evaluate("seg_t_linear_16", images, methods="evit")
    with pytest.raises(DtemError, match="num_classes = 7 requires weights"):
        dtem.evaluate("deit_tiny_patch16_224", images, num_classes=7)


def test_options_of_another_task_are_refused(model: nn.Module, images: Path) -> None:
    with pytest.raises(DtemError, match="short_side = 512 is for segmentation, and the model is for classification"):
        dtem.evaluate(model, images, short_side=512)
    with pytest.raises(DtemError, match="img_size: these are for a model given by name"):
        dtem.evaluate(model, images, img_size=96)
    with pytest.raises(DtemError, match="compare is for classifiers, and this model is for segmentation"):
        dtem.compare(create_segmenter("seg_t_linear_16", 3, img_size=(32, 32)), images)


def test_the_task_of_a_model(model: nn.Module) -> None:
    assert task_of(model) == "classification"
    assert task_of(dtem.patch(model).model) == "classification"
    segmenter = create_segmenter("seg_t_linear_16", 3, img_size=(32, 32))
    assert task_of(segmenter) == "segmentation"
    assert task_of(dtem.patch(segmenter).model) == "segmentation"
