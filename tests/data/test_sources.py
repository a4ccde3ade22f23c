import io
import itertools
import sys
import tarfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from dtem.data import readers, shards
from dtem.data.sources import Record, Source, is_image, open_source, without
from dtem.errors import DtemError
from dtem.models import hub

from .photo_folders import class_folders, encoded, picture, red, write


def all_of(source: Source) -> list[Record]:
    assert source.length is not None
    return [source.read(index) for index in range(source.length)]


# Folders


def test_labels_are_positions_of_class_folders(tmp_path: Path) -> None:
    for number, name in enumerate(["dog/b.png", "cat/deep/er/a.PNG", "cat/c.png", "emu/notes.txt", ".git/x.png"]):
        write(tmp_path / name, number)
    source = open_source(str(tmp_path))
    assert source.labelled
    assert source.length == 3
    assert source.names == ["cat/c.png", "cat/deep/er/a.PNG", "dog/b.png"]
    assert [(red(r.image), r.label, r.name) for r in all_of(source)] == [
        (2, 0, "cat/c.png"),
        (1, 0, "cat/deep/er/a.PNG"),
        (0, 1, "dog/b.png"),
    ]


def test_numbers_as_folder_names_are_the_labels(tmp_path: Path) -> None:
    source = open_source(str(class_folders(tmp_path, 3, ["007", "020", "3"])))
    assert source.labels == [7, 20, 3]


def test_one_name_that_is_no_number_makes_all_of_them_names(tmp_path: Path) -> None:
    assert open_source(str(class_folders(tmp_path, 3, ["007", "020", "x"]))).labels == [0, 1, 2]


def test_an_empty_class_folder_keeps_its_label(tmp_path: Path) -> None:
    class_folders(tmp_path, 2, ["a", "c"])
    (tmp_path / "b").mkdir()
    assert open_source(str(tmp_path)).labels == [0, 2]


def test_links_that_lead_back_add_no_images(tmp_path: Path) -> None:
    """To a folder above, to the folder itself, and twice to the same folder: every image is there once."""
    root = class_folders(tmp_path / "root", 4)
    expected = open_source(str(root)).names
    classes = sorted(path for path in root.iterdir() if path.is_dir())
    (classes[0] / "self").symlink_to(classes[0], target_is_directory=True)
    (classes[0] / "above").symlink_to(root, target_is_directory=True)
    (classes[1] / "far").symlink_to(tmp_path, target_is_directory=True)
    assert open_source(str(root)).names == expected
    write(tmp_path / "more" / "9.png", 9)
    for name in ("one", "two"):
        (classes[0] / name).symlink_to(tmp_path / "more", target_is_directory=True)
    linked = set(open_source(str(root)).names) - set(expected)
    assert linked == {f"{classes[0].name}/one/9.png"}


def test_images_without_class_folders_have_no_labels(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.png", number)
    source = open_source(str(tmp_path))
    assert not source.labelled
    assert [(record.label, record.name) for record in all_of(source)] == [(-1, "0.png"), (-1, "1.png")]


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "b.c.png", "a.webp", "a.bmp", "a.gif", "a.tif", "a.TIFF", "a.ppm"])
def test_image_extensions(name: str) -> None:
    assert is_image(name)
    assert not is_image(f"{name}.txt")
    assert not is_image(f"._{name}")


def test_folder_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DtemError, match=r"there is no folder .*nowhere"):
        open_source(str(tmp_path / "nowhere"))
    with pytest.raises(DtemError, match=r"holds no images: looked for jpg, jpeg, png"):
        open_source(str(tmp_path))
    write(tmp_path / "x.png", 0)
    with pytest.raises(DtemError, match="is not a folder"):
        open_source(str(tmp_path / "x.png"))
    write(tmp_path / "cat" / "y.png", 0)
    with pytest.raises(DtemError, match=r"class folders \(cat, …\) and images next to them \(x.png, …\)"):
        open_source(str(tmp_path))


def test_a_folder_of_splits_is_not_taken_for_classes(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", 2)
    class_folders(tmp_path / "val", 2)
    with pytest.raises(DtemError, match=r"splits, not classes: give one of them, e\.g\. .*train"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "message"), [("ftp:images", "no data scheme 'ftp'"), ("hf:", "must follow hf:"), ("no/such", "no folder")]
)
def test_unknown_specs(spec: str, message: str) -> None:
    with pytest.raises(DtemError, match=message):
        open_source(spec)


# Leaving images out


def test_without_compares_file_names_whatever_the_folder(tmp_path: Path) -> None:
    source = open_source(str(class_folders(tmp_path, 5)))
    selected, left_out = without(source, {"elsewhere/002.png", "003.png", "absent.png"})
    assert left_out == 2
    assert selected.length == 3
    assert [record.name for record in all_of(selected)] == selected.names == ["0/000.png", "0/004.png", "1/001.png"]
    assert selected.labels == [0, 0, 1]
    assert selected.name(2) == "1/001.png"
    assert [red(record.image) for record in all_of(selected)] == [0, 4, 1]


def test_without_nothing_to_leave_out_is_the_source_itself(tmp_path: Path) -> None:
    source = open_source(str(class_folders(tmp_path, 2)))
    assert without(source, []) == (source, 0)
    assert without(source, ["absent.png"]) == (source, 0)


def test_without_everything_is_refused(tmp_path: Path) -> None:
    source = open_source(str(class_folders(tmp_path, 2)))
    with pytest.raises(DtemError, match="all 2 images have names of files to leave out"):
        without(source, ["000.png", "001.png"])


# timm


def test_timm_folder(tmp_path: Path) -> None:
    class_folders(tmp_path / "val", 4, ["a", "b"])
    source = open_source(f"timm:folder/{tmp_path}#val")
    records = [(red(record.image), record.label, record.name) for record in all_of(source)]
    assert records == [(0, 0, "a/000.png"), (2, 0, "a/002.png"), (1, 1, "b/001.png"), (3, 1, "b/003.png")]
    assert source.names == [name for *_, name in records]
    assert source.labels == [0, 0, 1, 1]
    assert without(source, ["002.png"])[1] == 1


def test_timm_hands_out_the_broken_image_itself_not_its_neighbour(tmp_path: Path) -> None:
    class_folders(tmp_path, 2)
    (tmp_path / "0" / "000.png").write_bytes(b"broken")
    assert open_source(f"timm:folder/{tmp_path}").read(0).image == b"broken"


def test_timm_mistakes(tmp_path: Path) -> None:
    for rest, message in [
        (f"folder/{tmp_path}/none", "there is no folder"),
        (f"folder/{tmp_path}#train", "has no folder 'train'"),
        (f"folder/{tmp_path}", "timm cannot open"),  # empty
        (f"folder/{tmp_path}?rot=x", "'rot=x' is not an option"),
        ("hfids/cifar10", "cannot be resumed; use hf-stream:NAME"),
        ("torch/nothing", "timm cannot open"),
    ]:
        with pytest.raises(DtemError, match=message):
            open_source(f"timm:{rest}")


# Hugging Face datasets


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with two splits, as save_to_disk leaves it."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    features = datasets.Features(
        {"photo": datasets.Image(), "width": datasets.Value("int64"), "kind": datasets.ClassLabel(names=["a", "b"])}
    )

    def rows(numbers: range) -> object:
        images = [{"bytes": encoded(n), "path": f"{n:03d}.png"} for n in numbers]
        columns = {"photo": images, "width": [8] * len(numbers), "kind": [n % 2 for n in numbers]}
        return datasets.Dataset.from_dict(columns, features=features)

    datasets.DatasetDict({"train": rows(range(6)), "test": rows(range(6, 8))}).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_hf_saved_to_disk(saved: Path) -> None:
    source = open_source(f"hf:{saved}#test")
    assert source.labelled
    records = [(red(record.image), record.label, record.name) for record in all_of(source)]
    assert records == [(6, 0, "00000000/006.png"), (7, 1, "00000001/007.png")]
    assert source.names == ["00000000/006.png", "00000001/007.png"]
    assert source.labels == [0, 1]
    selected, left_out = without(source, ["folder/006.png"])
    assert left_out == 1
    assert red(selected.read(0).image) == 7


def test_hf_columns_by_name(saved: Path) -> None:
    assert open_source(f"hf:{saved}?image=photo&label=width#train").labels == [8] * 6
    unlabelled = open_source(f"hf:{saved}#train?label=")
    assert not unlabelled.labelled
    assert unlabelled.read(0).label == -1


def test_hf_stream(saved: Path) -> None:
    source = open_source(f"hf-stream:{saved}#train")
    assert source.length is None
    assert [red(record.image) for record in source.stream(None, 0)] == list(range(6))
    first, again, later = ([r.name[9:] for r in source.stream(3, epoch)] for epoch in (0, 0, 1))
    assert first == again
    assert first != later
    assert sorted(first) == sorted(later)
    selected, left_out = without(source, ["001.png"])
    assert left_out == 1
    assert [red(record.image) for record in selected.stream(None, 0)] == [0, 2, 3, 4, 5]


def test_hf_folder_of_parquet_files(saved: Path, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "parquet").mkdir()
    datasets.load_from_disk(str(saved))["train"].to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    source = open_source(f"hf-stream:{tmp_path / 'parquet'}")
    assert [(red(r.image), r.label) for r in source.stream(None, 0)] == [(n, n % 2) for n in range(6)]


def test_hf_mistakes(saved: Path, tmp_path: Path) -> None:
    for rest, message in [
        (f"{saved}", "name a split; it has #train, #test"),
        (f"{saved}#val", "there is no split 'val'; it has #train, #test"),
        (f"{saved}?label=species#train", "no column 'species'; it has photo, width, kind"),
        (f"{saved}/train#train", "saved without splits"),
        (f"{tmp_path}/none", "there is no folder"),
        (f"{tmp_path}/cache#train", "datasets cannot open"),
    ]:
        (tmp_path / "cache").mkdir(exist_ok=True)
        with pytest.raises(DtemError, match=message):
            open_source(f"hf:{rest}")


def test_hf_columns_that_are_not_clear() -> None:
    class Image:
        pass

    class ClassLabel:
        dtype = "int64"

    class Value:
        def __init__(self, dtype: str) -> None:
            self.dtype = dtype

    assert readers.columns("s", {"a": Image(), "n": Value("int32"), "t": Value("string")}, {}) == ("a", "n")
    assert readers.columns("s", {"a": Image(), "t": Value("string")}, {}) == ("a", None)
    assert readers.columns("s", {"a": Image(), "fine": ClassLabel(), "label": ClassLabel()}, {}) == ("a", "label")
    with pytest.raises(DtemError, match=r"which column is the label\? Name one of fine, coarse: \?label=fine"):
        readers.columns("s", {"a": Image(), "fine": ClassLabel(), "coarse": ClassLabel()}, {})
    with pytest.raises(DtemError, match=r"no column holds images; it has t"):
        readers.columns("s", {"t": Value("string")}, {})
    with pytest.raises(DtemError, match="does not say which columns"):
        readers.columns("s", None, {})


def test_hf_names_fail_at_once_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    offline = []

    def load_dataset(*_: object, **__: object) -> None:
        offline.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError("not cached")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_reachable", lambda _: False)
    with pytest.raises(DtemError, match=r"cannot open 'hf:owner/name': not cached"):
        open_source("hf:owner/name")
    assert offline == [True]
    assert not constants.HF_HUB_OFFLINE


def test_hf_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DtemError, match=r"datasets.*\.\[datasets\]"):
        open_source("hf:anything")


# Shards


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as shard:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for shard, name in enumerate(["s-08.tar", "s-09.tar", "s-10.tar.gz"]):
        numbers = range(4 * shard, 4 * shard + 4)
        pairs = [(f"d/{n:03d}.png", encoded(n)) for n in numbers], [(f"d/{n:03d}.cls", b"%d\n" % n) for n in numbers]
        members = {"d/readme.txt": b"", **dict(itertools.chain.from_iterable(zip(*pairs, strict=True)))}
        write_shard(tmp_path / name, members)
    return tmp_path


@pytest.mark.parametrize("pattern", ["s-{08..09}.tar", "s-*.tar", "s-0{8,9}.tar", "s-{08,09}.t{ar}"])
def test_shards_by_braces_and_globs(tars: Path, pattern: str) -> None:
    source = open_source(f"wds:{tars}/{pattern}")
    assert source.length is None
    assert source.labelled
    records = [(red(record.image), record.label, record.name) for record in source.stream(None, 0)]
    assert records == [(n, n, f"d/{n:03d}.png") for n in range(8)]


def test_a_folder_of_shards(tars: Path) -> None:
    assert [record.label for record in open_source(f"wds:{tars}").stream(None, 5)] == list(range(12))


def test_shards_shuffle_by_seed_and_epoch(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUFFER", 3)
    source = open_source(f"wds:{tars}")

    def order(seed: int, epoch: int) -> list[int]:
        return [record.label for record in source.stream(seed, epoch)]

    assert order(1, 0) == order(1, 0)
    orders = [order(1, 0), order(1, 1), order(2, 0), list(range(12))]
    assert all(sorted(found) == list(range(12)) for found in orders)
    assert len({tuple(found) for found in orders}) == 4


def test_shards_without_labels(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {"x.png": encoded(1), "y.png": encoded(2)})
    source = open_source(f"wds:{tmp_path}/a.tar")
    assert not source.labelled
    assert [(red(record.image), record.label) for record in source.stream(None, 0)] == [(1, -1), (2, -1)]


def test_without_some_of_a_stream(tars: Path) -> None:
    selected, left_out = without(open_source(f"wds:{tars}"), ["004.png", "011.png"])
    assert left_out == 2
    assert [record.label for record in selected.stream(None, 0)] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_shard_mistakes(tars: Path) -> None:
    with pytest.raises(DtemError, match=r"no shard .*s-10\.tar;"):
        open_source(f"wds:{tars}/s-{{08..11}}.tar")
    write_shard(tars / "empty.tar", {"a.txt": b"x"})
    with pytest.raises(DtemError, match="no images in"):
        open_source(f"wds:{tars}/empty.tar")
    write_shard(tars / "words.tar", {"a.png": encoded(1), "a.cls": b"cat"})
    with pytest.raises(DtemError, match=r"a.cls in shard .* holds b'cat', not the number"):
        open_source(f"wds:{tars}/words.tar")
    content = (tars / "s-08.tar").read_bytes()
    (tars / "cut.tar").write_bytes(content[: len(content) // 2 + 100])
    with pytest.raises(DtemError, match=r"cut\.tar cannot be read"):
        list(open_source(f"wds:{tars}/cut.tar").stream(None, 0))


def test_real_photographs(data_dir: Path) -> None:
    source = open_source(str(data_dir / "imagenet" / "val"))
    assert source.length == 1000
    assert source.labels == list(range(1000))
    assert source.names is not None
    assert source.read(472).name == source.names[472]
    assert source.names[472].startswith("472/ILSVRC2012_val_")


def test_pictures_tell_their_number() -> None:
    assert red(picture(7)) == red(encoded(7)) == 7
