"""`dtem show`."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from dtem.cli import main


@pytest.fixture
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (200, 180, 3), dtype=np.uint8)
    Image.fromarray(noise).save("photo.png")
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), "host.safetensors")
    return "photo.png"


TINY = ["--model", "test_vit", "--weights", "host.safetensors", "--num-classes", "3"]


def test_a_picture_and_a_document(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", photo, *TINY, "--method", "tome,evit", "--r", "9", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tome, evit = document["rows"]
    assert (tome["method"], tome["r"], evit["method"]) == ("tome", "9", "evit")
    assert tome["groups"][0] == document["grid"][0] * document["grid"][1] - 9
    part = tome["allocation"]
    assert part["foreground_tokens"] + part["background_tokens"] == pytest.approx(tome["groups"][-1])
    assert "class attention" in document["foreground_by"]
    assert len(tome["top5"]) == 3
    with Image.open("dtem-show.png") as drawn:
        assert drawn.width > 500


def test_tables_say_what_foreground_is(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (180, 200), 255).save("mask.png")
    assert main(["show", photo, *TINY, "--r", "9", "--mask", "mask.png", "--blocks", "1,2", "--out", "a.svg"]) == 0
    out = capsys.readouterr().out
    for text in ("by the mask", "100 %", "merges exactly as tome does", "Picture: a.svg"):
        assert text in out
    assert Path("a.svg").read_text().count("<image") == 6


def test_the_shipped_digit_reader(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", photo, "--model", "digits_vit", "--r", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["adapters"] == ["digits_vit.dtem.safetensors"]
    tome, ours = document["rows"]
    assert tome["tokens"][-1] == ours["tokens"][-1] == 11
    assert tome["allocation"] != ours["allocation"]  # the embeddings are trained


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--out", "a.pdf"], ".png or .svg"),
        (["--r", "8,16"], "one r"),
        (["--blocks", "0"], "--blocks 0 is not known"),
        (["--blocks", "99"], "there is no block 99 (the first is 1): the model has"),
        (["--method", "nothing"], "nothing"),
        (["--mask", "nowhere.png"], "no image file nowhere.png"),
    ],
)
def test_mistakes_are_named(photo: str, argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", photo, *TINY, *argv]) == 2
    assert named in capsys.readouterr().err


def test_a_model_without_a_classifier_says_nothing(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    headless = [word for pair in zip(TINY[::2], TINY[1::2], strict=True) if pair[0] != "--num-classes" for word in pair]
    assert main(["show", photo, *headless, "--num-classes", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unmerged"]["top5"] == []
    assert [row["top5"] for row in document["rows"]] == [[], []]


def test_a_file_that_is_no_image(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "host.safetensors", *TINY]) == 2
    assert "host.safetensors is not an image file" in capsys.readouterr().err
    assert main(["show", photo, "--model", "digits_vit", "--global-pool", "avg"]) == 2
    assert "digits_vit has a fixed configuration" in capsys.readouterr().err


SEGMENTER = ["--model", "seg_t_linear_16", "--random-weights", "--img-size", "32", "--method", "tome", "--r", "50%"]


def test_a_segmenter_shows_classes_and_groups(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--labels", "camvid", "--short-side", "45", "--blocks", "last", "--part", "mlp", "--json"]
    assert main(["show", photo, *SEGMENTER, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["grid"], document["blocks"], document["part"]) == ([4, 3], [12], "mlp")
    assert document["rows"][0]["groups"] == [6]
    assert sum(document["classes"].values()) == pytest.approx(100)
    assert main(["show", photo, *SEGMENTER]) == 0
    assert "Predicted by the unmerged model: class " in capsys.readouterr().out
    with Image.open("dtem-show.png") as drawn:
        assert drawn.width > 4 * 180  # classes, and the groups of three blocks


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--out", "a.svg"], "must end in .png"),
        (["--labels", "nowhere"], "--labels nowhere: give camvid, voc"),
        (["--labels", "voc", "--num-classes", "3"], "21 classes, and the model has 3"),
        (["--method", "evit"], "evit"),
    ],
)
def test_mistakes_with_a_segmenter(photo: str, argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", photo, *SEGMENTER, *argv]) == 2
    assert named in capsys.readouterr().err
