"""`dtem calibrate`, and costs counted image by image in `dtem eval` and `dtem compare`."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from test_evaluate import CLASSES, MODEL, folder, host, loader  # noqa: F401 - the fixture

import dtem
from dtem import schedule
from dtem.cli import main
from dtem.measure import flops


def command(folder: Path, verb: str, *more: object) -> list[str]:  # noqa: F811
    start = [verb, "--model", MODEL, "--weights", folder / "w.safetensors", "--classes", CLASSES]
    return [str(part) for part in (*start, "--data", folder / "images", *more, "--json")]


def counted(handle: dtem.Handle, plan: list[int]) -> float:
    handle.r = plan
    return flops.count(handle.model, handle.host.image).macs / 1e9


def costs_of(handle: dtem.Handle, r: object, folder: Path, batch: int) -> list[float]:  # noqa: F811
    """What every image costs at `r`, each counted at the plan that it came to."""
    pixels = torch.cat([part.images for part in loader(folder).epoch(0)])
    found = []
    for part in pixels.split(batch):
        handle.r = r
        with torch.no_grad(), handle.trace() as trace:
            handle.model(part)
        left = torch.stack([(size > 0).sum(1) for size in trace.sizes], dim=1)
        first = torch.full_like(left[:, :1], handle.host.patches + handle.host.prefix)
        found += [by_hand(handle, counts) for counts in torch.cat([first, left], dim=1).tolist()]
    return found


def by_hand(handle: dtem.Handle, counts: list[int]) -> float:
    """GFLOPs of an image with so many tokens before and after each block, added up from the model's widths."""
    model, host = handle.model, handle.host
    width, hidden = host.width, model.blocks[0].mlp.fc1.out_features
    total = host.patches * 3 * 16 * 16 * width + CLASSES * width
    for n, m in itertools.pairwise(counts):
        total += n * 4 * width**2 + 2 * n * n * width + 2 * m * width * hidden
        if m < n and handle.method.name == "ats":
            total += n * width  # one row of attention
        elif m < n:
            total += n * width * handle.method.dim + (n // 2) * ((n - 1) // 2) * handle.method.dim
    return total / 1e9


def test_thresholds_are_found_kept_and_evaluated(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = counted(dtem.patch(host()), [0] * 6)
    kept = tmp_path / "b.safetensors"
    more = ["--gflops", round(0.85 * full, 4), "--adapter", folder / "a.safetensors", "--out", kept]
    assert main(command(folder, "calibrate", *more)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["images"] == 6
    assert document["mean_gflops"] == pytest.approx(0.85 * full, rel=0.02)
    handle = dtem.from_pretrained(kept, host())
    assert str(handle.merger.adaptive) == document["r"] == str(handle.merger.schedule)

    assert main(command(folder, "eval", "--adapter", kept, "--r", "adaptive,8", "--batch", 1, "--method", "tome")) == 0
    rows = {(row["method"], row["r"]): row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {("unmerged", "0"), ("tome", "8"), ("dtem", "adaptive"), ("dtem", "8")}
    each = costs_of(handle, "adaptive", folder, 1)
    row = rows["dtem", "adaptive"]
    assert row["macs"] / 1e9 == pytest.approx(sum(each) / 6, rel=2e-3)
    low, high = torch.tensor(each).quantile(torch.tensor([0.25, 0.75])).tolist()
    assert row["macs_quartiles"] == [pytest.approx(1e9 * low, rel=5e-3), pytest.approx(1e9 * high, rel=5e-3)]
    assert rows["dtem", "8"]["macs_quartiles"] is None


def test_ats_is_counted_by_the_tokens_that_are_there(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Padded, it would seem to cost what the plan says; and a budget would be met by far."""
    assert main(command(folder, "eval", "--method", "ats", "--r", "5", "--batch", 4)) == 0
    row = json.loads(capsys.readouterr().out)["rows"][1]
    handle = dtem.patch(host(), "ats")
    each = costs_of(handle, 5, folder, 4)
    assert row["macs"] / 1e9 == pytest.approx(sum(each) / 6, rel=2e-3)
    assert row["macs"] / 1e9 < counted(handle, [5] * 6)
    assert row["tokens"] < handle.tokens[-1]

    budget = round(0.85 * counted(handle, [0] * 6), 4)
    more = ["--gflops", budget, "--method", "tome,ats", "--time", 0, "--batch", 4]
    assert main(command(folder, "compare", *more)) == 0
    rows = {one["method"]: one for one in json.loads(capsys.readouterr().out)["rows"]}
    assert abs(rows["ats"]["off_budget"]) < 0.05  # one step of its ladder, in a tiny model
    assert rows["ats"]["macs_quartiles"] is not None


@pytest.mark.parametrize(
    ("verb", "more", "message"),
    [
        ("eval", ["--r", "adaptive"], "nothing is calibrated in tome"),
        ("eval", ["--method", "ats", "--r", "5", "--shortcut"], "without the shortcut"),
        ("eval", ["--method", "evit", "--r", "t0.5"], "does not merge by edges"),
        ("calibrate", ["--gflops", "0.1", "--method", "tome", "--out", "x.safetensors"], "no trained parts to keep"),
        ("calibrate", ["--gflops", "0.1", "--method", "evit"], "does not merge by edges"),
        ("calibrate", ["--gflops", "100"], "merges nothing"),
        ("calibrate", ["--gflops", "-1"], "cannot be met"),
        ("calibrate", ["--gflops", "0.1", "--limit", "0"], "--limit 0 must be 1 or more"),
        ("compare", ["--gflops", "0.00001", "--method", "ats", "--time", "0"], "cannot be met by ats"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    verb: str,
    more: list[str],
    message: str,
) -> None:
    assert main(command(folder, verb, *more)) == 2
    assert message in capsys.readouterr().err


def test_thresholds_have_no_count_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", MODEL, "--r", "t0.5"]) == 2
    assert "neither counted without images" in capsys.readouterr().err
    assert isinstance(schedule.parse("t0.5"), schedule.Threshold)
