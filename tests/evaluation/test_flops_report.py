"""`dtem.count_flops`: the same numbers as the counter, from a name, a model or a handle, which stays as it was."""

import pytest
import timm
import torch

import dtem
from dtem.errors import DtemError
from dtem.evaluation.flops_report import short_plan
from dtem.measure import flops


def tiny() -> torch.nn.Module:
    return timm.create_model("test_vit").eval()


def test_a_name_a_model_and_a_handle_are_counted_alike() -> None:
    by_name = dtem.count_flops("test_vit", r=[0, 8, "20%"], method="tome")
    model = tiny()
    by_model = dtem.count_flops(model, r="0,8,20%", method="tome")
    by_handle = dtem.count_flops(dtem.patch(tiny(), "tome"), r=["0", 8, 0.2])
    assert by_name == by_model == by_handle
    assert not hasattr(model, "dtem")
    handle = dtem.patch(model, "tome")
    for row in by_name.rows:
        with handle.at(r=row.r):
            count = flops.count(model, handle.host.image)
            assert (row.macs, row.paper, row.plan) == (count.macs, count.paper, list(handle.plan))
    unmerged, merged = by_name.rows[:2]
    assert unmerged.macs_reduction_percent == 0
    assert merged.paper_reduction_percent == pytest.approx(100 * (1 - merged.paper / unmerged.paper))


def test_a_handle_is_counted_at_its_own_r_and_stays_as_it_was() -> None:
    handle = dtem.patch(tiny(), r=[8, 8, 4, 0, 0, 0])
    handle.mode = "soft"
    (row,) = dtem.count_flops(handle).rows
    assert (row.r, row.plan) == ("8/8/4/0/0/0", [8, 8, 4, 0, 0, 0])
    assert (handle.r, handle.mode) == ([8, 8, 4, 0, 0, 0], "soft")
    assert dtem.count_flops(handle.model).rows == [row]


def test_options_reach_the_model() -> None:
    report = dtem.count_flops("test_vit", img_size=(96, 128), global_pool="avg", num_classes=7)
    assert report.image == [3, 96, 128]
    model = timm.create_model("test_vit", img_size=(96, 128), global_pool="avg", num_classes=7)
    assert [row.r for row in report.rows] == ["0", "8", "16"]
    assert report.rows[0].macs == flops.count(model, (3, 96, 128)).macs


def test_report_has_a_table_and_a_document() -> None:
    report = dtem.count_flops("test_vit", r=[0, 16])
    assert "16 ×5, 10" in str(report)
    assert "<td>16 ×5, 10</td>" in report._repr_html_()
    assert list(report.to_dict()) == [
        "model", "method", "image", "tokens", "parameters_added", "conventions", "rows",
    ]  # fmt: skip
    assert set(report.to_dict()["rows"][0]) == {
        "r", "plan", "tokens", "macs", "paper", "macs_reduction_percent", "paper_reduction_percent",
    }  # fmt: skip


def test_a_segmenter_is_counted() -> None:
    report = dtem.count_flops("seg_t_mask_16", r="20%,50%")
    assert report.tokens == 1025
    assert report.rows[0].macs > report.rows[1].macs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tomato"}, "'tomato' is not known"),
        ({"adapter": "a", "method": "tome"}, "leave method = 'tome' out"),
        ({"r": []}, "holds no schedule"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(DtemError, match=message):
        dtem.count_flops("test_vit", **options)


def test_a_patched_model_has_its_method_and_a_built_one_its_options() -> None:
    handle = dtem.patch(tiny())
    with pytest.raises(DtemError, match="method = 'tome': the model is patched with 'dtem'"):
        dtem.count_flops(handle, method="tome")
    with pytest.raises(DtemError, match="img_size: these are for a model given by name"):
        dtem.count_flops(tiny(), img_size=64)


@pytest.mark.parametrize(
    ("plan", "short"), [((0, 0), "0 ×2"), ((16,) * 11 + (10,), "16 ×11, 10"), ((3, 2, 1), "3, 2, 1"), ((), "")]
)
def test_short_plans(plan: tuple[int, ...], short: str) -> None:
    assert short_plan(plan) == short
