"""Datasets of images with captions, listed in a file:

    FILE.json    Karpathy's split file (``{"images": [{"filename", "split", "sentences": [{"raw"}]}]}``; COCO's also has
                 ``filepath``), or a list of ``{"filename", "split", "captions"}``
    FILE.jsonl   one object per line: ``{"image": "a.jpg", "captions": ["…"]}``, or ``"caption"``, ``"split"``
    FILE.txt     Flickr's token file: ``a.jpg#0<TAB>A caption .``

``FILE#SPLIT`` takes one split (``train`` includes Karpathy's ``restval``); ``FILE#SPLIT?images=DIR`` names the folder
of the images, by default ``images`` beside the file, else the folder of the file.

A dataset is a `Source` whose labels are positions in `items`, so that the same `Loader` reads it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtem.data.sources import Record, Source
from dtem.errors import DtemError

_TRAIN = ("train", "restval")


class Item(NamedTuple):
    """One image with its reference captions."""

    name: str
    """Path below the image folder."""
    captions: tuple[str, ...]
    split: str | None = None


class Captions(Source):
    """Images with captions; the label of an image is its position in `items`."""

    def __init__(self, spec: str, folder: Path, items: Sequence[Item]) -> None:
        super().__init__(spec, labelled=True, length=len(items))
        self.folder = folder
        self.items = list(items)

    def read(self, index: int) -> Record:
        item = self.items[index]
        return Record((self.folder / item.name).read_bytes(), index, item.name)

    @property
    def names(self) -> list[str]:
        return [item.name for item in self.items]

    @property
    def labels(self) -> Sequence[int]:
        return range(len(self.items))


def open_captions(spec: str) -> Captions:
    """Open the dataset of a spec; the forms are at the top of this module."""
    text, _, query = spec.partition("?")
    file, _, split = text.partition("#")
    options = dict(part.partition("=")[::2] for part in query.split("&") if part)
    if unknown := set(options) - {"images"}:
        raise DtemError(f"{spec}: {sorted(unknown)[0]!r} is not known after the question mark; write ?images=DIR")
    path = Path(file)
    if not path.is_file():
        raise DtemError(f"{file or spec!r} is not a file of captions; give a Karpathy .json, a .jsonl, or a token .txt")
    items = _one_per_image(_read(path), path)
    if split:
        known = sorted({item.split for item in items if item.split is not None})
        items = [item for item in items if item.split in (_TRAIN if split == "train" else (split,))]
        if not items:
            raise DtemError(f"{file} has no images of the split {split!r}; it has: {', '.join(known) or 'no splits'}")
    source = Captions(spec, _folder(path, options.get("images")), items)
    missing = [name for name in source.names if not (source.folder / name).is_file()]
    if len(missing) == len(items):
        raise DtemError(
            f"none of the {len(items)} images of {file} is in {source.folder}, e.g. {missing[0]}: name their folder, "
            f"{text}?images=DIR"
        )
    return source


def _folder(file: Path, images: str | None) -> Path:
    if images is not None:
        if not Path(images).is_dir():
            raise DtemError(f"images={images}: there is no folder {images}")
        return Path(images)
    beside = file.parent / "images"
    return beside if beside.is_dir() else file.parent


def _read(path: Path) -> Iterator[Item]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DtemError(f"{path} cannot be read as text: {error}") from error
    try:
        if path.suffix == ".json":
            content = json.loads(text)
            entries = content["images"] if isinstance(content, dict) and "images" in content else content
            if not isinstance(entries, list):
                raise TypeError("neither a list of images nor an object that has one as 'images'")
            return iter([_item(entry) for entry in entries])
        if path.suffix == ".jsonl":
            return iter([_item(json.loads(line)) for line in text.split("\n") if line.strip()])
        return iter([_token_line(line) for line in text.split("\n") if line.strip()])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DtemError(f"{path} is damaged or has another form: {reason}") from error


def _item(entry: dict[str, Any]) -> Item:
    """One image of a JSON file, in any of the forms."""
    name = entry.get("filename") or entry.get("image")
    if not isinstance(name, str):
        raise KeyError("filename")
    if "sentences" in entry:
        captions = [sentence["raw"] for sentence in entry["sentences"]]
    elif "captions" in entry:
        captions = list(entry["captions"])
    else:
        captions = [entry["caption"]]
    if not all(isinstance(caption, str) and caption.strip() for caption in captions) or not captions:
        raise TypeError(f"{name} has captions that are not text: {captions!r:.80}")
    return Item(str(Path(entry.get("filepath", ""), name)), tuple(map(str.strip, captions)), entry.get("split"))


def _token_line(line: str) -> Item:
    head, tab, caption = line.partition("\t")
    name, number, _ = head.rpartition("#")
    if not tab or not number or not caption.strip():
        raise ValueError(f"{line!r:.80} is not 'IMAGE#NUMBER<TAB>CAPTION'")
    return Item(name, (caption.strip(),))


def _one_per_image(items: Iterable[Item], path: Path) -> list[Item]:
    """Items with the captions of each image together: a token file has one line per caption."""
    images: dict[str, Item] = {}
    for item in items:
        known = images.get(item.name)
        images[item.name] = item if known is None else known._replace(captions=known.captions + item.captions)
    if not images:
        raise DtemError(f"{path} holds no captions")
    return list(images.values())
