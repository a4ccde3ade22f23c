"""Per-image outcomes as safetensors files, paired by the names of the images."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from dtem.errors import DtemError
from dtem.files import write_file

FORMAT = 1


class StoredOutcomes:
    """Tensors with one row per image, by the names of the images. Subclasses are dataclasses: names, then tensors."""

    names: list[str]
    header: ClassVar[str]
    """Key of the file's header."""
    dtypes: ClassVar[dict[str, torch.dtype]]
    """The tensors by name."""

    def __init__(self, names: list[str], *tensors: Tensor) -> None:
        raise NotImplementedError

    def __post_init__(self) -> None:
        if not self.names:
            raise DtemError("there are no outcomes: not one image was evaluated")
        name, times = Counter(self.names).most_common(1)[0]
        if times > 1:
            raise DtemError(f"the image name {name!r} occurs more than once; outcomes are paired by unique names")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order of the fields."""
        return [getattr(self, name) for name in self.dtypes]

    def first(self, images: int) -> Self:
        """The outcomes of the first images."""
        return type(self)(self.names[:images], *(tensor[:images] for tensor in self.tensors))

    def save(self, path: str | Path, about: str = "") -> None:
        """Write a safetensors file, atomically; `about` says what was evaluated."""
        named = zip(self.dtypes.items(), self.tensors, strict=True)
        tensors = {name: tensor.detach().cpu().to(dtype).contiguous() for (name, dtype), tensor in named}
        header = json.dumps({"format": FORMAT, "names": self.names})
        write_file(path, to_bytes(tensors, {self.header: header, "about": about}))

    @classmethod
    def load(cls, path: str | Path, about: str | None = None) -> Self:
        """Read what `save` wrote; a file that is damaged, something else, or not `about` this is refused by name."""
        try:
            return cls._read(Path(path), about)
        except DtemError as error:
            raise DtemError(f"{path}: {error}") from error

    @classmethod
    def _read(cls, path: Path, about: str | None) -> Self:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                header = json.loads(metadata.get(cls.header, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise DtemError(f"this is not a complete safetensors file ({error})") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DtemError(f"the file cannot be read: {error}") from error
        if not isinstance(header, dict) or "format" not in header:
            raise DtemError("this is not a file of outcomes; `dtem eval --out` writes them")
        if header["format"] != FORMAT:
            raise DtemError(f"these are outcomes of format {header['format']!r}; this version reads format {FORMAT}")
        names = header.get("names")
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or dtypes != cls.dtypes:
            raise DtemError(f"the outcomes are damaged: they hold {', '.join(sorted(dtypes)) or 'nothing'}")
        if about is not None and metadata.get("about", "") != about:
            raise DtemError(
                f"this is an evaluation of something else ({metadata.get('about', '')}, now: {about}): choose another "
                "folder for out, or remove it"
            )
        return cls(names, *(tensors[name] for name in cls.dtypes))


T = TypeVar("T", bound=StoredOutcomes)


def pool(parts: Sequence[T]) -> T:
    """Outcomes on disjoint images as one, such as those of several folds or processes."""
    if not parts:
        raise DtemError("there are no outcomes to pool")
    names = [name for part in parts for name in part.names]
    return type(parts[0])(names, *map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))
