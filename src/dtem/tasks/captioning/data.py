"""Images with captions, from a file that lists them.

    FILE.json    Karpathy's split file (``{"images": [{"filename", "split", "sentences": [{"raw"}]}]}``; COCO's also has
                 ``filepath``), or a list of ``{"filename", "split", "captions"}``
    FILE.jsonl   one object per line: ``{"image": "a.jpg", "captions": ["…"]}``, or ``"caption"``, ``"split"``
    FILE.txt     Flickr's token file: ``a.jpg#0<TAB>A caption .``

``FILE#SPLIT`` takes one split (``train`` has Karpathy's ``restval`` in it), ``FILE#SPLIT?images=DIR`` says where the
images are; by default in ``images`` beside the file, else right beside it.

What comes out is a `Source` as for classification, whose label is the position in `items`: so the same `Loader`
decodes, shuffles, shares out and skips what cannot be read.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtem.tasks.classification.sources import Record, Source
from dtem.types import DtemError

_TRAIN = ("train", "restval")


class Item(NamedTuple):
    """One image with what people have said of it."""

    name: str
    """Its file, below the image folder."""
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

    @property
    def missing(self) -> list[str]:
        """Images that are not there."""
        return [name for name in self.names if not (self.folder / name).is_file()]


def open_captions(spec: str) -> Captions:
    """The images and captions that `spec` stands for; the forms are listed at the head of this module."""
    text, _, query = spec.partition("?")
    file, _, split = text.partition("#")
    options = dict(part.partition("=")[::2] for part in query.split("&") if part)
    if unknown := set(options) - {"images"}:
        raise DtemError(f"{spec}: {sorted(unknown)[0]!r} is not known after the question mark; write ?images=DIR")
    path = Path(file)
    if not path.is_file():
        raise DtemError(f"{file or spec!r} is no file of captions; give a Karpathy .json, a .jsonl, or a token .txt")
    items = _joined(_read(path), path)
    if split:
        known = sorted({item.split for item in items if item.split is not None})
        items = [item for item in items if item.split in (_TRAIN if split == "train" else (split,))]
        if not items:
            raise DtemError(f"{file} has no images of the split {split!r}; it has: {', '.join(known) or 'no splits'}")
    source = Captions(spec, _folder(path, options.get("images")), items)
    missing = source.missing
    if len(missing) == len(items):
        raise DtemError(
            f"none of the {len(items)} images of {file} is in {source.folder}, e.g. {missing[0]}: say where they are, "
            f"{text}?images=DIR"
        )
    return source


def _folder(file: Path, given: str | None) -> Path:
    if given is not None:
        if not Path(given).is_dir():
            raise DtemError(f"images={given} is not a folder")
        return Path(given)
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
        raise DtemError(f"{path} is damaged or of another form: {reason}") from error


def _item(entry: dict[str, Any]) -> Item:
    """One image of a JSON file, whichever of the forms it has."""
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
        raise TypeError(f"{name} has captions that are no text: {captions!r:.80}")
    return Item(str(Path(entry.get("filepath", ""), name)), tuple(map(str.strip, captions)), entry.get("split"))


def _token_line(line: str) -> Item:
    head, tab, caption = line.partition("\t")
    name, number, _ = head.rpartition("#")
    if not tab or not number or not caption.strip():
        raise ValueError(f"{line!r:.80} is not 'IMAGE#NUMBER<TAB>CAPTION'")
    return Item(name, (caption.strip(),))


def _joined(items: Iterable[Item], path: Path) -> list[Item]:
    """One item per image: a token file has as many lines as captions."""
    found: dict[str, Item] = {}
    for item in items:
        known = found.get(item.name)
        found[item.name] = item if known is None else known._replace(captions=known.captions + item.captions)
    if not found:
        raise DtemError(f"{path} holds no captions")
    return list(found.values())
