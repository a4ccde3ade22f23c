"""`dtem predict` on a tiny random model and generated images: what is kept, what resumes, what is refused."""

import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dtem
from dtem.cli import main
from dtem.data import sources
from dtem.errors import DtemError
from dtem.evaluation import prediction_files
from dtem.evaluation.predict import RemainingImages
from dtem.evaluation.prediction_files import PartialPredictions

parquet = pytest.importorskip("pyarrow.parquet", reason='needs pip install ".[predict]"')

MODEL = "deit_tiny_patch16_224"
CLASSES = 4
COUNT = 7


def host() -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(MODEL, img_size=32, num_classes=CLASSES)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, names of classes, and seven photographs of noise, one of them cut off."""
    root = tmp_path_factory.mktemp("predict")
    save_file(host().state_dict(), root / "w.safetensors")
    (root / "labels.txt").write_text("cat\ndog\nowl\nbee\n")
    (root / "images").mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(COUNT):
        noise = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=generator).numpy()
        Image.fromarray(noise).save(root / "images" / f"{number}.png")
    content = (root / "images" / "3.png").read_bytes()
    (root / "images" / "3.png").write_bytes(content[: len(content) // 2])
    return root


def command(folder: Path, out: Path, data: str | None = None, *more: str) -> list[str]:
    model_options = ["--weights", f"{folder}/w.safetensors", "--num-classes", str(CLASSES), "--img-size", "32"]
    model_options += ["--labels", f"{folder}/labels.txt", "--r", "1", "--batch-size", "2", "--top", "3"]
    return ["predict", data or f"{folder}/images", "--model", MODEL, "--out", str(out), *model_options, *more]


def expected(folder: Path, name: str) -> torch.Tensor:
    """The probabilities, by hand: no loader, no command."""
    from timm.data import create_transform, resolve_data_config

    model = host()
    dtem.patch(model, r=1)
    transform = create_transform(**resolve_data_config({"input_size": (3, 32, 32)}, model=model))
    with torch.no_grad():
        return model(transform(Image.open(folder / "images" / name).convert("RGB"))[None]).softmax(dim=1)[0]


def test_every_image_has_its_classes(folder: Path, tmp_path, capsys) -> None:
    assert main([*command(folder, tmp_path / "p.parquet"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["images"] == COUNT
    assert list(document["unreadable"]) == ["3.png"]
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["name"] for row in rows] == [f"{number}.png" for number in range(COUNT)]
    assert [row["position"] for row in rows] == list(range(COUNT))
    assert rows[3]["class"] is None
    assert "truncated" in rows[3]["error"]
    for row in rows[:3] + rows[4:]:
        wanted = expected(folder, row["name"]).topk(3)
        assert row["classes"] == wanted.indices.tolist()
        assert row["probabilities"] == pytest.approx(wanted.values.tolist(), abs=1e-5)
        assert row["class"] == row["classes"][0]
        assert row["class_name"] == ["cat", "dog", "owl", "bee"][row["class"]]
        assert row["error"] is None
        assert row["label"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]


def test_deit_s_predicts_where_no_model_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, names = host(), []
    monkeypatch.setattr(timm, "create_model", lambda name, **_options: names.append(name) or model)
    argv = [word for word in command(folder, tmp_path / "p.parquet") if word not in ("--model", MODEL)]
    assert main(argv) == 0
    assert names == ["deit_small_patch16_224"]


def test_an_interrupted_run_goes_on(folder: Path, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(folder, tmp_path / "whole.parquet")) == 0
    out = tmp_path / "p.parquet"
    monkeypatch.setattr(prediction_files, "SAVE_SECONDS", 0.0)
    real, calls = PartialPredictions.add, []

    def killed(self, rows):
        real(self, rows)
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(PartialPredictions, "add", killed)
    assert main(command(folder, out)) == 130
    assert not out.exists()
    assert calls == [2, 2]  # two batches, of which the second had the bad image in it
    monkeypatch.setattr(PartialPredictions, "add", real)
    capsys.readouterr()
    assert main([*command(folder, out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_after"] == 4
    assert parquet.read_table(out).to_pylist() == parquet.read_table(tmp_path / "whole.parquet").to_pylist()
    assert main(command(folder, out)) == 0  # nothing is left to do
    assert f"{COUNT} of them were done before" in capsys.readouterr().out


def test_two_runs_cannot_write_one_file(folder: Path, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "p.parquet"
    monkeypatch.setattr(prediction_files, "SAVE_SECONDS", 0.0)
    real, codes = PartialPredictions.add, []

    def meanwhile(self, rows):
        real(self, rows)
        if not codes:
            codes.append(None)
            codes[0] = main(command(folder, out))

    monkeypatch.setattr(PartialPredictions, "add", meanwhile)
    assert main(command(folder, out)) == 0
    assert codes == [2]
    error = capsys.readouterr().err
    assert re.search(rf"p\.parquet is in use by another predict run \(process {os.getpid()} on .*, since 20", error)
    assert parquet.read_table(out)["position"].to_pylist() == list(range(COUNT))
    assert [path.name for path in tmp_path.iterdir()] == ["p.parquet"]


def test_another_run_is_refused(folder: Path, tmp_path, capsys) -> None:
    out = tmp_path / "p.parquet"
    assert main(command(folder, out)) == 0
    assert main([*command(folder, out), "--r", "0"]) == 2
    assert "differs in r" in capsys.readouterr().err
    (tmp_path / "text.parquet").write_text("hello")
    assert main(command(folder, tmp_path / "text.parquet")) == 2
    assert "not a table of predictions" in capsys.readouterr().err


def test_other_images_of_the_same_names_are_another_run(folder: Path, tmp_path, capsys) -> None:
    for place, shade in (("a", 10), ("b", 200)):
        (tmp_path / place / "day").mkdir(parents=True)
        Image.new("RGB", (40, 40), (shade, 0, 0)).save(tmp_path / place / "day" / "1.png")
    out = tmp_path / "p.parquet"
    assert main(command(folder, out, f"{tmp_path}/a/day")) == 0
    assert main(command(folder, out, f"{tmp_path}/b/day")) == 2
    assert "differs in images" in capsys.readouterr().err
    Image.new("RGB", (40, 40), (0, 90, 0)).save(tmp_path / "a" / "day" / "1.png")
    assert main(command(folder, out, f"{tmp_path}/a/day")) == 2


@pytest.mark.parametrize("scheme", ["timm:folder/", "hf:"])
def test_so_are_those_that_a_library_reads(scheme: str, folder: Path, tmp_path, capsys, monkeypatch) -> None:
    if scheme == "hf:":
        pytest.importorskip("datasets", reason="datasets is not installed")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for place, number in (("a", 0), ("b", 1)):
        (tmp_path / place / "same" / "0").mkdir(parents=True)
        (tmp_path / place / "same" / "0" / "0.png").write_bytes((folder / "images" / f"{number}.png").read_bytes())
    runs = [command(folder, tmp_path / "p.parquet", f"{scheme}{tmp_path}/{place}/same") for place in ("a", "b")]
    assert main(runs[0]) == 0
    assert main(runs[0]) == 0
    assert main(runs[1]) == 2
    assert re.search("it differs in (data, )?images", capsys.readouterr().err)


def test_no_name_stops_a_run(folder: Path, tmp_path) -> None:
    """A link to nothing, bytes that are no UTF-8, a class that is a date, brackets."""
    images = tmp_path / "images" / "20240115123000"
    images.mkdir(parents=True)
    content = (folder / "images" / "0.png").read_bytes()
    (images / "a[red].png").write_bytes(content)
    (images / "b\udcff.png").write_bytes(content)
    (images / "c.png").symlink_to(tmp_path / "nowhere")
    assert main(command(folder, tmp_path / "p.parquet", str(images.parent))) == 0
    table = parquet.read_table(tmp_path / "p.parquet")
    assert [Path(name).name for name in table["name"].to_pylist()] == ["a[red].png", "b\\xff.png", "c.png"]
    assert table["label"].to_pylist()[:2] == [20240115123000] * 2
    assert [error is None for error in table["error"].to_pylist()] == [True, True, False]


def test_what_a_killed_run_left_is_cleared(folder: Path, tmp_path) -> None:
    out = tmp_path / "p.parquet"
    assert main(command(folder, out)) == 0
    (tmp_path / "p.parquet.parts").mkdir()
    (tmp_path / "p.parquet.parts" / "run.json").write_text("{}")
    assert main(command(folder, out)) == 0
    assert not (tmp_path / "p.parquet.parts").exists()


def test_strips_and_odd_names_are_rows_too(folder: Path, tmp_path, capsys) -> None:
    (tmp_path / "odd").mkdir()
    Image.new("RGB", (1, 60000)).save(tmp_path / "odd" / "strip.png")
    Image.new("RGB", (40, 40)).save(tmp_path / "odd" / "fine.png")
    out = tmp_path / "p.parquet"
    assert main([*command(folder, out, f"{tmp_path}/odd"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["images"] == 2
    assert document["unreadable"] == {"strip.png": "the image is 1 × 60000, more than 100 times as long as wide"}


def test_shards_and_their_labels(folder: Path, tmp_path) -> None:
    with tarfile.open(tmp_path / "a-0.tar", "w") as shard:
        for number in (0, 3, 5):
            image = (folder / "images" / f"{number}.png").read_bytes()
            for name, content in ((f"{number}.png", image), (f"{number}.cls", b"2")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    assert main(command(folder, tmp_path / "p.parquet", f"wds:{tmp_path}/a-{{0..0}}.tar")) == 0
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert [(row["position"], row["name"], row["label"]) for row in rows if row["error"] is None] == [
        (0, "0.png", 2),
        (2, "5.png", 2),
    ]
    assert rows[1]["name"] == "3.png"
    assert rows[0]["classes"] == expected(folder, "0.png").topk(3).indices.tolist()


@pytest.mark.parametrize("streamed", [False, True])
def test_shares_are_the_whole_without_overlap(folder: Path, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.open_source(f"{folder}/images")
    if streamed:
        records = [source.read(index) for index in range(COUNT)]
        source.length = None
        monkeypatch.setattr(source, "stream", lambda seed, epoch: iter(records), raising=False)
    found = []
    for rank in range(3):
        share = RemainingImages(source, {0, 5}, rank, 3)
        own = share.stream(None, 0) if streamed else (share.read(index) for index in range(share.length))
        found += [record.name for record in own]
    assert sorted(found) == [f"{number}\t{number}.png" for number in (1, 2, 3, 4, 6)]


def test_two_processes_write_the_file_of_one(folder: Path, tmp_path) -> None:
    assert main(command(folder, tmp_path / "one.parquet")) == 0
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    verb = command(folder, tmp_path / "two.parquet")
    argv = [*run, "-m", "--", "dtem.cli", *verb]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (parquet.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("one", "two"))
    close = functools.partial(pytest.approx, rel=1e-3)
    for row in one:
        if row["error"] is None:
            row["probability"], row["probabilities"] = close(row["probability"]), close(row["probabilities"])
    assert sorted(two, key=lambda row: row["position"]) == sorted(one, key=lambda row: row["position"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_images_that_are_all_bad_are_listed(folder: Path, tmp_path, capsys) -> None:
    (tmp_path / "bad").mkdir()
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / "bad" / name).write_bytes(b"no image")
    assert main(command(folder, tmp_path / "p.parquet", f"{tmp_path}/bad")) == 0
    assert "2 could not be read" in capsys.readouterr().out
    assert parquet.read_table(tmp_path / "p.parquet").num_rows == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--top", "0"], "--top 0"),
        (["--r", "1,2"], "give one r"),
        (["--r", "99/x"], "99/x"),
        (["--model", "deit_tiny_patch16"], "timm has no model"),
        (["--labels", "nowhere"], "cannot be read"),
        (["--labels", "TWO"], "has 2 lines, and the model 4 classes"),
        (["--num-classes", "0"], "has no classifier"),
        (["--out", "FOLDER"], "is a folder; name a file in it"),
    ],
)
def test_mistakes(folder: Path, tmp_path, capsys, more: list[str], says: str) -> None:
    (tmp_path / "two.txt").write_text("a\nb\n")
    places = {"TWO": str(tmp_path / "two.txt"), "FOLDER": str(tmp_path)}
    assert main([*command(folder, tmp_path / "p.parquet"), *(places.get(word, word) for word in more)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "p.parquet.parts").exists(), "the command can be mended and given again"


def test_a_damaged_part_is_named(folder: Path, tmp_path) -> None:
    parts = PartialPredictions(tmp_path / "p.parquet", {"r": "1"})
    parts.folder.mkdir()
    (parts.folder / "run.json").write_text('{"r": "1"}')
    (parts.folder / "0000-1-000001.parquet").write_bytes(b"half")
    with pytest.raises(DtemError, match=r"0000-1-000001.parquet is damaged"):
        PartialPredictions(tmp_path / "p.parquet", {"r": "1"})
