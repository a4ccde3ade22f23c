"""Datasets of images with masks. `open_pairs` opens one by its spec:

    DIR                     DIR/images and DIR/masks, same names; DIR/classes.yaml, or one folder up
    ade20k:ROOT#training    ROOT/images/training and ROOT/annotations/training, 150 classes, 0 ignored
    voc:ROOT#train          ROOT/JPEGImages and ROOT/SegmentationClass, listed in ROOT/ImageSets/Segmentation/train.txt
    camvid:ROOT#train       ROOT/train/images and ROOT/train/masks, or ROOT/train and ROOT/trainannot; 11 classes

``?part=0:300`` after any of them takes some of the pairs, in the order of their names (``?part=300:`` the rest).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtem.data.sources import Record, Source, is_image
from dtem.errors import DtemError
from dtem.tasks.segmentation import classes as class_lists
from dtem.tasks.segmentation.classes import Classes

if TYPE_CHECKING:
    from PIL import Image

SCHEMES = ("ade20k", "voc", "camvid")
CLASSES = "classes.yaml"


class Pair:
    """An image and its mask, decoded by `load`."""

    image: "Image.Image"
    mask: "Image.Image"

    def __init__(self, image: Path, mask: Path) -> None:
        self.image_path = image
        self.mask_path = mask

    def load(self) -> None:
        """Read both files."""
        from PIL import Image

        with Image.open(self.image_path) as image:
            self.image = image.convert("RGB")
        with Image.open(self.mask_path) as mask:
            mask.load()
            self.mask = mask


class Pairs(Source):
    """Images with masks, in the order of their names."""

    def __init__(self, spec: str, pairs: Sequence[tuple[Path, Path]], classes: Classes) -> None:
        super().__init__(spec, True, len(pairs))
        self.pairs = list(pairs)
        self.classes = classes

    def read(self, index: int) -> Record:
        return Record(Pair(*self.pairs[index]), 0, self.names[index])

    @property
    def names(self) -> Sequence[str]:
        """The names of the image files."""
        return [image.name for image, _ in self.pairs]


def open_pairs(spec: str) -> Pairs:
    """Open the dataset of a spec; the forms are at the top of this module."""
    plain, _, query = spec.partition("?")
    scheme, colon, rest = plain.partition(":")
    if colon and scheme in SCHEMES:
        root, _, split = rest.partition("#")
        if not split:
            raise DtemError(f"{spec}: which split? Write {scheme}:{rest or 'FOLDER'}#train, as its folder is called")
        images, masks, names, classes = {"ade20k": _ade20k, "voc": _voc, "camvid": _camvid}[scheme](Path(root), split)
    elif colon and len(scheme) > 1 and "/" not in scheme and not Path(plain).exists():
        raise DtemError(
            f"{spec}: there is no data scheme {scheme!r}; give a folder, or {', '.join(SCHEMES)}:FOLDER#SPLIT"
        )
    else:
        folder = Path(plain)
        images, masks, names, classes = folder / "images", folder / "masks", None, _classes_of(folder)
    pairs = _match(images, masks, names)
    return Pairs(spec, _part(pairs, query, spec), classes)


Layout = tuple[Path, Path, "list[str] | None", Classes]
"""Folder of images, folder of masks, file stems of the split (None: all), classes."""


def _ade20k(root: Path, split: str) -> Layout:
    return root / "images" / split, root / "annotations" / split, None, class_lists.ade20k(root)


def _voc(root: Path, split: str) -> Layout:
    listed = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listed.is_file():
        raise DtemError(f"there is no {listed}, which names the images of the split {split!r}")
    return root / "JPEGImages", root / "SegmentationClass", listed.read_text().split(), class_lists.voc()


def _camvid(root: Path, split: str) -> Layout:
    if (root / f"{split}annot").is_dir():
        return root / split, root / f"{split}annot", None, class_lists.camvid()
    return root / split / "images", root / split / "masks", None, class_lists.camvid()


def _classes_of(folder: Path) -> Classes:
    if not folder.is_dir():
        raise DtemError(
            f"there is no folder {folder}; give one with images/ and masks/ in it, or {', '.join(SCHEMES)}:…"
        )
    for path in (folder / CLASSES, folder.parent / CLASSES):
        if path.is_file():
            return class_lists.from_yaml(path)
    raise DtemError(f"{folder} has no {CLASSES}, nor has the folder above: it must name the classes (docs/tasks.md)")


def _match(images: Path, masks: Path, names: list[str] | None) -> list[tuple[Path, Path]]:
    """Images and masks of the same name; one without the other is refused."""
    stems = {}
    for what, folder in (("images", images), ("masks", masks)):
        if not folder.is_dir():
            raise DtemError(f"there is no folder {folder} with the {what}")
        files = sorted(path for path in folder.iterdir() if is_image(path.name) and not path.name.startswith("."))
        stems[what] = {path.stem: path for path in files}
        if not files:
            raise DtemError(f"{folder} holds no {what}")
    wanted = names if names is not None else sorted(stems["images"].keys() | stems["masks"].keys())
    if not wanted:
        raise DtemError(f"the split names no images of {images}")
    for what, other, folder in (("images", "mask", images), ("masks", "image", masks)):
        if missing := [name for name in wanted if name not in stems[what]]:
            more = f" and {len(missing) - 1} more" * (len(missing) > 1)
            raise DtemError(
                f"{folder} has no {missing[0]!r}{more}, but there is the {other} of that name; every image needs a mask"
            )
    return [(stems["images"][name], stems["masks"][name]) for name in wanted]


def _part(pairs: list[tuple[Path, Path]], query: str, spec: str) -> list[tuple[Path, Path]]:
    if not query:
        return pairs
    bounds = re.fullmatch(r"part=(\d*):(\d*)", query)
    if bounds is None:
        raise DtemError(f"{spec}: ?{query} is not understood; write ?part=0:300 for the first 300 pairs")
    begin, end = (int(number) if number else None for number in bounds.groups())
    if not (part := pairs[begin:end]):
        raise DtemError(f"{spec}: there are only {len(pairs)} pairs, and none in that part")
    return part
