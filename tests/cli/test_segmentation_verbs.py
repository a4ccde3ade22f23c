"""The command line for segmentation, on made-up scenes and random weights."""

import json
from pathlib import Path

import pytest
from PIL import Image

from dtem import cli
from tasks.segmentation.scenes import folder

MODEL = ["--model", "seg_t_linear_16", "--random-weights", "--img-size", "32"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("cli") / "set")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*words: object, code: int = 0) -> tuple[str, str]:
        assert cli.main([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        return out, err

    return call


def test_train_eval_show(run, scenes: Path, tmp_path: Path) -> None:
    """A host, embeddings for it, the table, the picture."""
    common = ["--data", scenes, "--workers", 0, "--batch-size", 3, "--img-size", 32]
    host = ["--model", "seg_t_linear_16", "--num-classes", 3]
    out, _ = run(
        "train", *common, *host, "--random-weights", "--preset", "segmenter_host", "--updates", 1,
        "--out", tmp_path / "host", "--eval-data", scenes, "--json",
    )  # fmt: skip
    assert json.loads(out)["evaluation"][0]["r"] == "0"
    weights = ["--weights", tmp_path / "host" / "model.safetensors"]
    run(
        "train", *common, *host, *weights, "--preset", "segmenter_few", "--updates", 1, "--out", tmp_path / "own",
        "--option", "relaxed=1", "--scales", 1, 1,
    )  # fmt: skip
    adapter = ["--adapter", tmp_path / "own" / "adapter.safetensors"]
    command = [
        "eval", "--model", "seg_t_linear_16", *weights, "--img-size", 32, "--data", scenes, *adapter, "--r", "0,50%",
        "--out", tmp_path / "results", "--plot", tmp_path / "curve.svg",
    ]  # fmt: skip
    out, _ = run(*command, "--json")
    document = json.loads(out)
    assert [(row["method"], row["r"]) for row in document["rows"]] == [
        ("unmerged", "0"),
        ("tome", "50%"),
        ("dtem", "50%"),
    ]
    assert document["images"] == 6
    assert document["rows"][2]["macs"] < document["rows"][0]["macs"]
    assert set(document["rows"][2]["against_tome"]) == {"value", "low", "high"}
    assert document["rows"][0]["images_per_second"] > 0
    assert (tmp_path / "curve.svg").exists()
    assert json.loads((tmp_path / "results" / "record.json").read_text())["results"]["images"] == 6
    out, _ = run(*command)  # all outcomes are stored already
    assert "mIoU" in out
    assert "IoU % by class" in out
    assert "sky" in out
    _, err = run(*command, "--short-side", 16, code=2)
    assert "evaluation of something else" in err
    out, _ = run(
        "show", scenes / "images" / "a.png", "--model", "seg_t_linear_16", *weights, *adapter, "--img-size", 32,
        "--labels", scenes / "classes.yaml", "--method", "tome", "--r", "50%", "--blocks", "1,12",
        "--out", tmp_path / "a.png", "--json",
    )  # fmt: skip
    shown = json.loads(out)
    assert shown["grid"] == [2, 3]
    assert [row["groups"] for row in shown["rows"]] == [[3, 3], [3, 3]]
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 3 * 48


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--r", "60%"], "ratio 0.6 is outside"),
        (["--window", "0"], "--window 0 is not a size"),
        (["--stride", "16"], "--stride 16x16 requires a window"),
        (["--num-classes", "7"], "--num-classes 7"),
        (["--data", "nowhere"], "there is no folder nowhere"),
        (["--method", "evit"], "no variant for dense prediction"),
        (["--batch-size", "4"], "--batch-size 4 is for classification and captioning"),
        (["--dtype", "bfloat16", "--knn", "."], "--knn . is for classification"),
    ],
)
def test_mistakes_are_named(run, scenes: Path, words: list[str], message: str) -> None:
    data = [] if "--data" in words else ["--data", scenes]
    _, err = run("eval", *MODEL, *data, *words, code=2)
    assert message in err
    assert "Traceback" not in err


def test_which_weights(run, scenes: Path) -> None:
    _, err = run("eval", "--model", "seg_t_linear_16", "--data", scenes, code=2)
    assert "no weights to download" in err
    assert "--random-weights" in err


def test_fisher_initialisation_alone(run, scenes: Path, tmp_path: Path) -> None:
    command = ["train", "--data", scenes, "--workers", 0, "--batch-size", 3, *MODEL, "--num-classes", 3]
    command += ["--method", "dtem", "--r", "40%", "--fisher-init", 2, "--epochs", 0, "--out", tmp_path]
    document = json.loads(run(*command, "--json")[0])
    assert (document["updates"], document["loss"], document["files"]) == (0, None, ["adapter.safetensors"])


def test_a_segmenter_is_counted_and_timed(run) -> None:
    model = ["--model", "seg_t_linear_16", "--random-weights", "--img-size", "64"]
    flops = ["flops", "--model", "seg_t_linear_16", "--img-size", "64"]
    full, half = json.loads(run(*flops, "--r", "0,50%", "--json")[0])["rows"]
    assert full["tokens"] == half["tokens"] == 17  # unmerged after every component
    assert half["macs"] < 0.8 * full["macs"]
    timed = json.loads(run("bench", *model, "--r", "50%", "--batch-size", 1, "--rounds", "1", "--json")[0])
    assert {row["r"] for row in timed["rows"]} >= {"50%"}
