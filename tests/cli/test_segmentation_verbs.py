"""The command line for segmentation, on made-up scenes and random weights."""

import json
from pathlib import Path

import pytest
from PIL import Image

from dtem import cli
from dtem.cli import tasks
from tasks.segmentation.scenes import folder

MODEL = ["--model", "seg_t_linear_16", "--random", "--img-size", "32"]


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
    """The whole way: a host, embeddings for it, the table, the picture."""
    common = ["--task", "segmentation", "--data", scenes, "--workers", 0, "--batch", 3, "--img-size", 32]
    host = ["--model", "seg_t_linear_16", "--classes", 3]
    out, _ = run(
        "train", *common, *host, "--random", "--preset", "segmenter_host", "--updates", 1, "--out", tmp_path / "host",
        "--eval-data", scenes, "--json",
    )  # fmt: skip
    assert json.loads(out)["evaluation"][0]["r"] == "0"
    weights = ["--weights", tmp_path / "host" / "model.safetensors"]
    run(
        "train", *common, *host, *weights, "--preset", "segmenter_few", "--updates", 1, "--out", tmp_path / "own",
        "--option", "relaxed=1", "--scales", 1, 1,
    )  # fmt: skip
    adapter = ["--adapter", tmp_path / "own" / "adapter.safetensors"]
    command = [
        "eval", "--task", "segmentation", "--model", "seg_t_linear_16", *weights, "--img-size", 32, "--data", scenes,
        *adapter, "--ratio", "0,0.5", "--out", tmp_path / "kept", "--plot", tmp_path / "curve.svg",
    ]  # fmt: skip
    out, _ = run(*command, "--json")
    found = json.loads(out)
    assert [(row["method"], row["ratio"]) for row in found["rows"]] == [
        ("unmerged", "0"),
        ("tome", "50%"),
        ("dtem", "50%"),
    ]
    assert found["images"] == 6
    assert found["rows"][2]["macs"] < found["rows"][0]["macs"]
    assert set(found["rows"][2]["against_tome"]) == {"value", "low", "high"}
    assert found["rows"][0]["images_per_second"] > 0
    assert (tmp_path / "curve.svg").exists()
    assert json.loads((tmp_path / "kept" / "record.json").read_text())["results"]["images"] == 6
    out, _ = run(*command)  # all is there already
    assert "mIoU" in out
    assert "IoU % by class" in out
    assert "sky" in out
    _, err = run(*command, "--short-side", 16, code=2)
    assert "evaluation of something else" in err
    out, _ = run(
        "show", "--task", "segmentation", scenes / "images" / "a.png", "--model", "seg_t_linear_16", *weights, *adapter,
        "--img-size", 32, "--classes", scenes / "classes.yaml", "--ratio", 0.5, "--blocks", "1,12", "--out",
        tmp_path / "a.png", "--json",
    )  # fmt: skip
    shown = json.loads(out)
    assert shown["grid"] == [2, 3]
    assert [row["groups"] for row in shown["rows"]] == [[3, 3], [3, 3]]
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 3 * 48


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ratio", "0.6"], "--ratio 0.6 is not a part"),
        (["--window", "0"], "--window 0 is not a size"),
        (["--stride", "16"], "goes with a window"),
        (["--classes", "7"], "--classes 7"),
        (["--data", "nowhere"], "not a folder"),
        (["--method", "evit"], "no form for dense prediction"),
    ],
)
def test_mistakes_are_named(run, scenes: Path, words: list[str], said: str) -> None:
    data = [] if "--data" in words else ["--data", scenes]
    _, err = run("eval", "--task", "segmentation", *MODEL, *data, *words, code=2)
    assert said in err
    assert "Traceback" not in err


def test_which_weights(run, scenes: Path) -> None:
    _, err = run("eval", "--task", "segmentation", "--model", "seg_t_linear_16", "--data", scenes, code=2)
    assert "which weights" in err


def test_tasks_have_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--task", "segmentation", "--help"])
    assert "--ratio" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    out = capsys.readouterr().out
    assert "--ratio" not in out
    assert "segmentation" in out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "--task", "poetry"])
    assert stopped.value.code == 2


def test_the_task_of_a_command_line() -> None:
    assert tasks.asked([]) == "classification"
    assert tasks.asked(["eval", "--task", "segmentation"]) == "segmentation"
    assert tasks.asked(["eval", "--task=captioning"]) == "captioning"
    assert tasks.asked(["eval", "--task"]) == ""


def test_sensing_alone(run, scenes: Path, tmp_path: Path) -> None:
    command = [
        "train",
        "--task",
        "segmentation",
        "--data",
        scenes,
        "--workers",
        0,
        "--batch",
        3,
        *MODEL,
        "--classes",
        3,
    ]
    command += ["--method", "dtem", "--r", "40%", "--sense", 2, "--epochs", 0, "--out", tmp_path]
    out, _ = run(*command, "--json")
    document = json.loads(out)
    assert (document["updates"], document["loss"], document["files"]) == (0, None, ["adapter.safetensors"])
    assert "what sensing 2 batches gave" in run(*command)[0]


def test_a_segmenter_is_counted_and_timed(run) -> None:
    counted = json.loads(run("flops", "seg_t_linear_16", "--img-size", "64", "--r", "0,50%", "--json")[0])
    whole, half = counted["rows"]
    assert whole["tokens"] == half["tokens"] == 17  # unmerged after every component
    assert half["macs"] < 0.8 * whole["macs"]
    timed = json.loads(run("bench", "seg_t_linear_16", "--img-size", "64", "--r", "50%", "--rounds", "1", "--json")[0])
    assert {row["r"] for row in timed["rows"]} >= {"50%"}
