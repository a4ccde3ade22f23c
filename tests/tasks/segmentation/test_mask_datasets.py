"""Layouts of datasets, lists of classes, and every way in which they can be wrong."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dtem.errors import DtemError
from dtem.tasks.segmentation import classes
from dtem.tasks.segmentation.mask_datasets import Pairs, open_pairs
from tasks.segmentation.scenes import CLASSES, COLOURS, NAMES, folder, scene, write


def masks_of(source: Pairs) -> list[np.ndarray]:
    masks = []
    for index in range(source.length or 0):
        pair = source.read(index).image
        pair.load()
        assert pair.image.mode == "RGB"
        masks.append(source.classes.read(pair.mask, pair.mask_path.name))
    return masks


def truth(seed: int) -> np.ndarray:
    mask = scene(seed)[1].astype(int)
    return np.where(mask == 3, -1, mask)


@pytest.mark.parametrize("coloured", [False, True])
def test_a_folder_of_ones_own(tmp_path: Path, coloured: bool) -> None:
    source = open_pairs(str(folder(tmp_path / "set", coloured)))
    assert source.classes.names == ("sky", "road", "car")
    assert list(source.names) == [f"{name}.png" for name in NAMES]
    for seed, mask in enumerate(masks_of(source)):
        assert np.array_equal(mask, truth(seed))


def test_classes_may_lie_one_folder_up(tmp_path: Path) -> None:
    folder(tmp_path / "set" / "train")
    (tmp_path / "set" / "train" / "classes.yaml").rename(tmp_path / "set" / "classes.yaml")
    assert len(open_pairs(str(tmp_path / "set" / "train")).classes) == 3


def test_ade20k(tmp_path: Path) -> None:
    write(tmp_path / "images" / "training", tmp_path / "annotations" / "training", offset=1, ignored=0)
    source = open_pairs(f"ade20k:{tmp_path}#training")
    assert len(source.classes) == 150
    assert source.classes.names[0] == "class 1"
    assert np.array_equal(masks_of(source)[2], truth(2))
    table = "Idx\tRatio\tTrain\tVal\tName\n" + "".join(f"{i}\t0\t0\t0\tthing{i}, other\n" for i in range(1, 151))
    (tmp_path / "objectInfo150.txt").write_text(table)
    assert open_pairs(f"ade20k:{tmp_path}#training").classes.names[149] == "thing150"
    (tmp_path / "objectInfo150.txt").write_text("Idx\tName\n1\twall\n")
    with pytest.raises(DtemError, match="1 classes, not 150"):
        open_pairs(f"ade20k:{tmp_path}#training")


def test_voc(tmp_path: Path) -> None:
    """Masks with a palette: the values count, not the colours."""
    write(tmp_path / "JPEGImages", tmp_path / "SegmentationClass")
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("b\nd\n")
    for file in (tmp_path / "SegmentationClass").iterdir():
        with Image.open(file) as mask:
            drawn = Image.fromarray(np.asarray(mask))
        drawn.putpalette([value for index in range(256) for value in classes.default_colour(index)])
        drawn.save(file)
        assert drawn.mode == "P"
    source = open_pairs(f"voc:{tmp_path}#val")
    assert list(source.names) == ["b.png", "d.png"]
    assert (len(source.classes), source.classes.names[15]) == (21, "person")
    assert np.array_equal(masks_of(source)[1], truth(3))
    assert source.classes.colours[:3] == ((0, 0, 0), (128, 0, 0), (0, 128, 0)), "the palette of the devkit"
    assert source.classes.colours[20] == (0, 64, 128)
    with pytest.raises(DtemError, match=r"train\.txt"):
        open_pairs(f"voc:{tmp_path}#train")


@pytest.mark.parametrize("layout", [("train/images", "train/masks"), ("train", "trainannot")])
def test_camvid(tmp_path: Path, layout: tuple[str, str]) -> None:
    write(tmp_path / layout[0], tmp_path / layout[1], ignored=11)
    source = open_pairs(f"camvid:{tmp_path}#train?part=1:3")
    assert list(source.names) == ["b.png", "c.png"]
    assert len(source.classes) == 11
    assert np.array_equal(masks_of(source)[0], truth(1))


def test_the_real_camvid(data_dir: Path) -> None:
    if not (data_dir / "camvid").is_dir():
        pytest.skip(f"no camvid in {data_dir}")
    sizes = {}
    for split in ("train", "val"):
        source = open_pairs(f"camvid:{data_dir / 'camvid'}#{split}")
        sizes[split] = source.length
        pair = source.read(0).image
        pair.load()
        assert pair.image.size == pair.mask.size == (480, 360)
        assert set(np.unique(source.classes.read(pair.mask, ""))) <= {-1, *range(11)}
    assert sizes == {"train": 367, "val": 101}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{}?part=0:9:2", r"\?part=0:9:2 is not understood"),
        ("{}?part=6:", "only 6 pairs"),
        ("camvid:{}", "which split"),
        ("moon:{}#train", "no data scheme 'moon'"),
        ("{}/nowhere", "there is no folder"),
        ("camvid:{}#test", "there is no folder"),
    ],
)
def test_specs_that_cannot_be(tmp_path: Path, spec: str, said: str) -> None:
    folder(tmp_path / "set")
    with pytest.raises(DtemError, match=said):
        open_pairs(spec.format(tmp_path / "set"))


def test_missing_pairs_and_empty_folders(tmp_path: Path) -> None:
    root = folder(tmp_path / "set")
    (root / "masks" / "c.png").unlink()
    with pytest.raises(DtemError, match=r"masks has no 'c', but there is the image"):
        open_pairs(str(root))
    (root / "images" / "c.png").unlink()
    (root / "images" / "a.png").unlink()
    (root / "images" / "b.png").unlink()
    with pytest.raises(DtemError, match=r"images has no 'a' and 1 more, but there is the mask"):
        open_pairs(str(root))
    for file in (root / "images").iterdir():
        file.unlink()
    with pytest.raises(DtemError, match="images holds no images"):
        open_pairs(str(root))
    (root / "classes.yaml").unlink()
    with pytest.raises(DtemError, match=r"no classes.yaml"):
        open_pairs(str(root))


def test_a_class_outside_the_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(CLASSES)
    loaded = classes.from_yaml(path)
    values = Image.fromarray(np.array([[0, 1], [7, 255]], np.uint8))
    with pytest.raises(DtemError, match=r"x.png has the value 7, .* 3 classes \(0 to 2\), nor one to ignore \(255\)"):
        loaded.read(values, "x.png")
    colours = Image.fromarray(np.array([[[10, 20, 200], [1, 2, 3]]], np.uint8))
    with pytest.raises(DtemError, match=r"colour \(1, 2, 3\)"):
        loaded.read(colours, "x.png")
    with pytest.raises(DtemError, match="in colours, and the classes have none"):
        classes.camvid().read(colours, "x.png")
    assert np.array_equal(loaded.read(Image.fromarray(COLOURS[None]), ""), [[0, 1, 2, -1]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "list under classes"),
        ("classes: []", "list under classes"),
        ("classes: [{color: [1, 2, 3]}]", "class 0"),
        ("classes: [{name: a, color: [1, 2, 300]}]", "not a colour"),
        ("classes: [{name: a, value: -1}]", "not a value"),
        ("classes: [a, a]", "name a is there twice"),
        ("classes: [a, {name: b, value: 0}]", "value 0 is there twice"),
        ("classes: [a, b]\nignore: 1", "value 1 is there twice"),
        ("classes: [{name: a, color: [1, 2, 3]}, b]", "1 of 2 classes have a color"),
        ("classes: {", "cannot be read as YAML"),
    ],
)
def test_lists_of_classes_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(DtemError, match=said):
        classes.from_yaml(tmp_path / "c.yaml")


def test_colours_of_our_own_differ() -> None:
    drawn = classes.ade20k(Path("nowhere")).drawn
    assert len(set(drawn)) == 150
    assert (0, 0, 0) not in drawn
