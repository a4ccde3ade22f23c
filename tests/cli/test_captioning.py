"""`dtem eval` and `dtem caption`, on a captioner of a few thousand weights."""

import json
import shutil

import pytest

from dtem.cli import main
from dtem.tasks.captioning import generate, metric
from tasks.captioning.small import write_captioner, write_pictures


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("captioning")
    write_pictures(place)
    write_captioner(place / "model")
    return place


def test_eval_without_java_says_what_it_needs(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(metric.shutil, "which", lambda name: None)
    command = ["eval", "--model", str(folder / "model"), "--r", "0,3,9", "--num-beams", "2"]
    command += ["--data", f"{folder}/captions.json#train", "--method", "tome,dtem", "--max-new-tokens", "5"]
    assert main([*command, "--json", "--out", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {(row["method"], row["r"]): row for row in document["rows"]}
    assert list(rows) == [("unmerged", "0"), ("tome", "3"), ("tome", "9"), ("dtem", "3"), ("dtem", "9")]
    assert [row["tokens"] for row in rows.values()] == [65, 53, 29, 53, 29]
    assert {row["CIDEr"] for row in rows.values()} == {"needs Java"}
    assert rows["tome", "9"]["loss"] == pytest.approx(rows["dtem", "9"]["loss"], rel=1e-5), "untrained, dtem is tome"
    assert rows["unmerged", "0"]["macs"] > rows["tome", "3"]["macs"] > rows["tome", "9"]["macs"]
    assert rows["dtem", "9"]["against_tome"]["loss"]["value"] == pytest.approx(0, abs=1e-5)
    assert set(json.loads((tmp_path / "captions.json").read_text())["tome-r9"]) == {f"{n}.png" for n in range(4)}
    assert json.loads((tmp_path / "record.json").read_text())["results"]["images"] == 4
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "needs Java" in shown
    assert "default-jre-headless" in shown


def test_dtype_reaches_the_captioner(folder, capsys, monkeypatch):
    monkeypatch.setattr(metric.shutil, "which", lambda name: None)
    command = ["eval", "--model", str(folder / "model"), "--r", "9", "--num-beams", "2", "--json"]
    command += ["--data", f"{folder}/captions.json#train", "--max-new-tokens", "3"]
    losses = {}
    for dtype in ("float32", "bfloat16", "float16"):
        assert main([*command, "--dtype", dtype]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["dtype"] == dtype
        losses[dtype] = [row["loss"] for row in document["rows"]]
    for dtype in ("bfloat16", "float16"):
        assert losses[dtype] != losses["float32"]
        assert losses[dtype] == pytest.approx(losses["float32"], rel=0.02)


def test_no_proportional_decoder_reaches_the_decoder(folder, capsys, monkeypatch):
    monkeypatch.setattr(metric.shutil, "which", lambda name: None)
    command = ["eval", "--model", str(folder / "model"), "--r", "9", "--num-beams", "1", "--json"]
    command += ["--data", f"{folder}/captions.json#train", "--max-new-tokens", "3"]
    losses = []
    for more in ([], ["--no-proportional-decoder"]):
        assert main([*command, *more]) == 0
        losses.append({row["method"]: row["loss"] for row in json.loads(capsys.readouterr().out)["rows"]})
    assert losses[0]["unmerged"] == losses[1]["unmerged"]
    assert losses[0]["tome"] != losses[1]["tome"]
    image = str(folder / "images" / "0.png")
    assert (
        main(
            [
                "caption",
                image,
                "--model",
                str(folder / "model"),
                "--r",
                "9",
                "--max-new-tokens",
                "3",
                "--no-proportional-decoder",
            ]
        )
        == 0
    )


def test_caption_prints_captions_at_each_r(folder, capsys):
    image = str(folder / "images" / "0.png")
    command = [
        "caption",
        image,
        "--model",
        str(folder / "model"),
        "--r",
        "0,9",
        "--num-beams",
        "2",
        "--max-new-tokens",
        "5",
    ]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["r"], row["tokens"]) for row in rows] == [("0", 65), ("9", 29)]
    assert all(isinstance(row["caption"], str) for row in rows)
    assert main(command) == 0
    assert "0.png" in capsys.readouterr().out


def test_caption_turns_a_photograph_upright(folder, capsys, tmp_path, monkeypatch):
    """As the camera was held: its files say so in EXIF."""
    from PIL import Image

    picture = Image.open(folder / "images" / "0.png").convert("RGB")
    picture.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to look at it
    picture.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    seen = []
    monkeypatch.setattr(generate, "generate_captions", lambda model, images, *_: seen.append(images) or ["a"])
    command = ["caption", str(tmp_path / "upright.png"), str(tmp_path / "turned.png"), "--r", "0", "--json"]
    assert main([*command, "--model", str(folder / "model")]) == 0
    assert seen[0].equal(seen[1])
    assert not seen[0].equal(seen[0].rot90(dims=(2, 3)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "--model", "MODEL", "--data", "nothing.json"], "not a file of captions"),
        (["caption", "MODEL/config.json", "--model", "MODEL"], "config.json is not an image file that can be read"),
        (["caption", "IMAGE", "--model", "MODEL", "--num-beams", "0"], "--num-beams 0"),
        (["eval", "--model", "x", "--data", "y", "--out", "IMAGE"], "cannot be made a folder"),
        (["caption", "IMAGE", "--model", "MODEL/nothing"], "there is no folder"),
        (["caption", "IMAGE", "--model", "BROKEN"], "cannot be loaded as a captioner"),
        (["caption", "IMAGE", "--model", "MODEL", "--max-new-tokens", "9999"], "--max-new-tokens 9999 is more than"),
    ],
)
def test_mistakes_are_said_in_a_line(folder, capsys, words, said):
    broken = shutil.copytree(folder / "model", folder / "broken", dirs_exist_ok=True)
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    places = {"MODEL": str(folder / "model"), "BROKEN": str(broken), "IMAGE": str(folder / "images" / "0.png")}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
