"""`dtem eval` on a tiny random model and generated images; once, marked slow, on photographs with real weights."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import dtem
from dtem.cli import main
from dtem.data import loader as loading
from dtem.data import sources
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.measure import flops, record
from dtem.tasks.classification import evaluator
from dtem.tasks.classification.outcomes import Outcomes, paired

MODEL = "test_vit"
CLASSES = 3


def host() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(MODEL, num_classes=CLASSES)
    with torch.no_grad():  # timm starts near zero: every image would get the same answer
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, six images in three class folders, two adapters that differ, one of which has seen two of the images."""
    root = tmp_path_factory.mktemp("eval")
    model = host()
    save_file(model.state_dict(), root / "w.safetensors")
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        (root / "images" / str(number % CLASSES)).mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (20, 20, 3), dtype=torch.uint8, generator=generator)
        image = Image.fromarray(pixels.numpy()).resize((180, 180), Image.Resampling.BICUBIC)
        image.save(root / "images" / str(number % CLASSES) / f"{number}.png")
    for name, notes in (("a", {}), ("b", {"trained_on": json.dumps(["1.png", "5.png", "elsewhere.png"])})):
        torch.manual_seed(len(notes))
        handle = dtem.patch(host(), r=8, init="random")
        dtem.save_pretrained(handle, root / f"{name}.safetensors", notes=notes)
    (root / "unlabelled").mkdir()
    Image.new("RGB", (20, 20)).save(root / "unlabelled" / "0.png")
    return root


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Run `dtem eval` on the folder; returns the document, or what is printed with text=True."""

    def command(*more: object, text: bool = False):
        argv = [
            "eval",
            "--model",
            MODEL,
            "--weights",
            folder / "w.safetensors",
            "--num-classes",
            CLASSES,
            "--batch-size",
            4,
        ]
        argv += ["--data", folder / "images", *more, *([] if text else ["--json"])]
        code = main([str(part) for part in argv])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out if text else json.loads(printed.out)

    return command


def by_name(document: dict) -> dict:
    return {(row["method"], row["r"]): row for row in document["rows"]}


def loader(folder: Path) -> loading.Loader:
    transform = eval_transform(resolve_data_config(host()))
    return loading.Loader(sources.open_source(str(folder / "images")), transform, 4)


def test_rows_are_what_evaluation_finds(run, folder: Path) -> None:
    document = run("--method", "tome, dtem", "--adapter", folder / "a.safetensors", "--r", "0,8,20%")
    rows = by_name(document)
    assert list(rows) == [("unmerged", "0"), *((method, r) for method in ("tome", "dtem") for r in ("8", "20%"))]
    base = evaluator.run_variants({"": host().eval()}, loader(folder))[""]
    handles = {"tome": dtem.patch(host(), "tome"), "dtem": dtem.from_pretrained(folder / "a.safetensors", host())}
    for (method, r), row in rows.items():
        if method == "unmerged":
            own, tokens, against = base, 101, None
        else:
            handles[method].r = r
            own = evaluator.run_variants({"": handles[method].model.eval()}, loader(folder))[""]
            count = flops.count(handles[method].model, handles[method].host.image)
            assert (row["macs"], row["paper"]) == (count.macs, count.paper)
            tokens, against = handles[method].tokens[-1], paired(base, own)
        assert (row["top1"], row["top5"], row["tokens"]) == (own.top1, own.top5, tokens)
        assert row["cross_entropy"] == pytest.approx(own.mean_loss, rel=1e-5)
        assert row["images_per_second"] > 0
        if against is not None:
            assert row["against_unmerged"]["top1"]["value"] == against.top1.value
            assert row["against_unmerged"]["loss"]["low"] == pytest.approx(against.loss.low, rel=1e-4)
    assert rows["unmerged", "0"]["against_unmerged"] is None
    assert rows["unmerged", "0"]["macs"] > rows["tome", "8"]["macs"]
    assert rows["tome", "8"]["cross_entropy"] != rows["dtem", "8"]["cross_entropy"]
    assert [(one["method"], one["r"], one["n"]) for one in document["against_tome"]] == [
        ("dtem", "8", 6),
        ("dtem", "20%", 6),
    ]
    assert document["images"] == 6


def test_every_image_is_decoded_once(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    plain = loading.decode
    monkeypatch.setattr(loading, "decode", lambda image: decoded.append(1) or plain(image))
    document = run("--r", "4,8", "--adapter", folder / "a.safetensors")
    assert len(document["rows"]) == 5
    assert len(decoded) == 6


def test_images_that_an_adapter_was_trained_on_are_left_out_for_all(run, folder: Path, tmp_path) -> None:
    both = ["--adapter", f"seen={folder / 'b.safetensors'}", "--adapter", f"other={folder / 'a.safetensors'}"]
    document = run(*both, "--r", "8", "--out", tmp_path)
    assert document["images"] == 4
    assert document["left_out"] == {"images": 2, "listed": {"seen": 3}}
    assert [row["method"] for row in document["rows"]] == ["unmerged", "tome", "seen", "other"]
    for path in tmp_path.glob("*.safetensors"):
        assert Outcomes.load(path).names == ["0/0.png", "0/3.png", "1/4.png", "2/2.png"]
    assert "2 training images of seen excluded" in run(*both, "--r", "8", text=True)


def test_files(run, folder: Path, tmp_path) -> None:
    out, plot = tmp_path / "new" / "out", tmp_path / "curve.svg"
    document = run("--r", "8,6/4/4/4/4/4", "--adapter", folder / "a.safetensors", "--out", out, "--plot", plot)
    assert sorted(path.name for path in out.iterdir()) == [
        "dtem-r6_4_4_4_4_4.safetensors",
        "dtem-r8.safetensors",
        "record.json",
        "tome-r6_4_4_4_4_4.safetensors",
        "tome-r8.safetensors",
        "unmerged.safetensors",
    ]
    saved = dtem.load_record(out / "record.json")
    assert (saved.kind, saved.results, saved.data) == ("eval", document, record.data_hash(folder / "images"))
    assert str(folder) not in (out / "record.json").read_text()
    assert Outcomes.load(out / "tome-r8.safetensors").top1 == by_name(document)["tome", "8"]["top1"]
    drawn = plot.read_text()
    for word in ("ToMe", "DTEM", "unmerged", "r=8", MODEL):
        assert f">{word}" in drawn


def test_compare_pairs_saved_files(run, folder: Path, tmp_path, capsys) -> None:
    document = run("--adapter", folder / "a.safetensors", "--r", "8", "--out", tmp_path)
    files = [str(tmp_path / f"{name}-r8.safetensors") for name in ("tome", "dtem")]
    assert main(["eval", "--compare", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"], found["b"]) == ("tome-r8", "dtem-r8")
    (expected,) = document["against_tome"]
    assert {key: found[key] for key in ("n", "top1", "only_a", "only_b", "p", "loss")} == {
        key: expected[key] for key in ("n", "top1", "only_a", "only_b", "p", "loss")
    }
    assert found["loss"]["value"] != 0
    assert main(["eval", "--compare", *files]) == 0
    assert "dtem-r8 against tome-r8" in capsys.readouterr().out


def test_tables(run, folder: Path) -> None:
    out = run("--adapter", folder / "a.safetensors", "--r", "8", text=True)
    for text in (
        "GFLOPs",
        "(MACs)",
        "(paper)",
        "points against",
        "Against tome at the same r",
        "McNemar",
        "6 images",
        "dtem bench",
    ):
        assert text in out


def test_untrained_dtem_is_tome(run) -> None:
    rows = by_name(run("--method", "tome,dtem", "--r", "8"))
    assert rows["dtem", "8"]["top1"] == rows["tome", "8"]["top1"]
    assert rows["dtem", "8"]["cross_entropy"] == pytest.approx(rows["tome", "8"]["cross_entropy"], rel=1e-4)


def test_limit_draws_the_same_images_of_all_classes(run, tmp_path) -> None:
    for name in ("a", "b"):
        assert run("--r", "0", "--limit", 3, "--out", tmp_path / name)["images"] == 3
    one, other = (Outcomes.load(tmp_path / name / "unmerged.safetensors").names for name in ("a", "b"))
    assert one == other != ["0/0.png", "0/3.png", "1/1.png"]


def test_unreadable_files_are_counted(run, folder: Path, tmp_path) -> None:
    for path in (folder / "images").rglob("*.png"):
        copy = tmp_path / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / "images" / "1" / "4.png").write_bytes(b"no image")
    more = ["--r", "8", "--data", tmp_path / "images"]
    document = run(*more)
    assert document["images"] == 5
    assert list(document["unreadable"]) == ["1/4.png"]
    assert "1 files that cannot be read" in run(*more, text=True)


def test_autocast(run) -> None:
    full, half = (run("--r", "8", "--dtype", dtype)["rows"][0] for dtype in ("float32", "bfloat16"))
    assert full["cross_entropy"] != half["cross_entropy"]
    assert full["cross_entropy"] == pytest.approx(half["cross_entropy"], rel=0.1)


def test_the_image_size_reaches_the_images(run, folder: Path, tmp_path) -> None:
    small = timm.create_model(MODEL, num_classes=CLASSES, img_size=96)
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    document = run("--r", "4", "--img-size", 96, "--weights", tmp_path / "small.safetensors")
    assert document["rows"][0]["tokens"] == 37


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--data", "{}/nowhere"], ["there is no folder", "nowhere"]),
        (["--data", "{}/unlabelled"], ["has no labels", "one folder per class"]),
        (["--r", "500"], ["500"]),
        (["--r", "x"], ["--r x is not a schedule"]),
        (["--method", "tomato"], ["'tomato'", "tome"]),
        (["--method", ""], ["''"]),
        (["--adapter", "{}/none.safetensors"], ["none.safetensors"]),
        (["--adapter", "{}/w.safetensors"], ["w.safetensors", "not a dtem adapter"]),
        (["--adapter", "{}/a.safetensors", "--adapter", "{}/b.safetensors"], ["'dtem' is taken", "LABEL=FILE"]),
        (["--adapter", "tome={}/a.safetensors"], ["'tome' is a method and the label of an adapter"]),
        (["--adapter", "unmerged={}/a.safetensors"], ["'unmerged' is taken"]),
        (["--adapter", "a b={}/a.safetensors"], ["LABEL=FILE"]),
        (["--batch-size", "0"], ["--batch-size 0"]),
        (["--workers", "-1"], ["--workers -1"]),
        (["--limit", "1"], ["--limit 1"]),
        (["--plot", "curve.gif"], ["curve.gif", ".png"]),
        (["--plot", "curve.png", "--r", "0"], ["nothing to draw", "--r 0"]),
        (["--window", "64"], ["--window 64x64 is for segmentation, and the model is for classification"]),
        (["--num-beams", "2"], ["--num-beams 2 is for captioning"]),
        (["--knn", "{}/images", "--num-neighbours", "0"], ["--num-neighbours 0 must be 1 or more"]),
        (["--out", "{}/w.safetensors"], ["w.safetensors"]),
        (["--num-classes", "2"], ["--num-classes 3"]),
        (["--compare", "{}/a.safetensors", "{}/b.safetensors"], ["a.safetensors", "not a file of outcomes"]),
        (["--compare", "{}/x", "{}/y"], ["/x"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_mistakes_explain_themselves(given: list[str], says: list[str], folder: Path, capsys) -> None:
    argv = ["eval", "--model", MODEL, "--weights", f"{folder}/w.safetensors", "--num-classes", str(CLASSES)]
    argv += ["--data", f"{folder}/images", *(part.replace("{}", str(folder)) for part in given)]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    for text in says:
        assert text in printed.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["eval", "--model", MODEL], "--data is missing"),
        (["eval", "--data", "."], "--model is missing"),
        (["eval", "--model", MODEL, "--data", ".", "--num-classes", "3"], "--num-classes 3 requires weights"),
    ],
)
def test_what_must_be_given(argv: list[str], says: str, capsys) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_no_cuda_is_a_mistake(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["eval", "--model", MODEL, "--data", ".", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_all_images_seen_in_training(folder: Path, tmp_path, capsys) -> None:
    handle = dtem.patch(host(), r=8)
    notes = {"trained_on": json.dumps([f"{number}.png" for number in range(6)])}
    dtem.save_pretrained(handle, tmp_path / "all.safetensors", notes=notes)
    argv = ["eval", "--model", MODEL, "--weights", f"{folder}/w.safetensors", "--num-classes", str(CLASSES)]
    assert main([*argv, "--data", f"{folder}/images", "--adapter", f"{tmp_path}/all.safetensors"]) == 2
    assert "all 6 images have names of files to leave out" in capsys.readouterr().err
    argv += ["--data", f"{folder}/images", "--adapter", f"{tmp_path}/all.safetensors", "--r", "8", "--json"]
    assert main([*argv, "--keep-listed"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deit_tiny_on_photographs(data_dir: Path, capsys) -> None:
    weights = data_dir / "weights" / "deit_tiny_patch16_224.fb_in1k.safetensors"
    argv = ["eval", "--model", "deit_tiny_patch16_224", "--weights", str(weights), "--method", "tome", "--r", "16"]
    assert main([*argv, "--data", str(data_dir / "imagenet" / "val"), "--json"]) == 0
    base, merged = json.loads(capsys.readouterr().out)["rows"]
    assert base["top1"] == pytest.approx(74.4, abs=0.11)  # one photograph in a thousand may round to the other side
    assert merged["against_unmerged"]["top1"]["high"] < -1
    assert merged["against_unmerged"]["p"] < 0.001
    assert merged["cross_entropy"] > base["cross_entropy"]
