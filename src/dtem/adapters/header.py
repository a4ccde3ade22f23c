"""The JSON header of adapter files: fields and their types, names of older versions, and the digest of the tensors."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dtem._version import __version__
from dtem.errors import DtemError

FORMAT = 2
"""2: may hold scales and biases for the host's norms. Files of format 1 are read as before."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Header = dict[str, Any]
_DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_REQUIRED: dict[str, tuple[type, ...]] = {
    "version": (str,),
    "method": (str,),
    "options": (dict,),
    "host": (dict,),
    "schedule": (str,),
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "dim": (int, type(None)),
    "hidden": (list, type(None)),
    "trained_r": (str, type(None)),
    "notes": (dict,),
    "digest": (str,),
}
HOST_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "family": (str,),
    "depth": (int,),
    "width": (int,),
    "heads": (int,),
    "head_dim": (int,),
    "prefix": (int,),
    "pooling": (str,),
}
_RENAMED_OPTIONS = {"priced": "fisher"}
_RENAMED_METHODS = {"dtem_no_prop": "dtem"}  # such files have proportional=False among their options
"""Names in files of dtem 0.3 and older, and their present ones."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b of the names, dtypes, shapes and bytes of all tensors, by name."""
    total = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{len(name)} {name} {tensor.dtype} {tuple(tensor.shape)} ".encode(errors="surrogatepass"))
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"blake2b:{total.hexdigest()}"


def check(header: object, tensors: Mapping[str, Tensor]) -> Header:
    """Refuse a header that is none, or whose values have the wrong types; and tensors that are not those of its digest.

    Files of dtem 0.3 and older, of format 1, have no digest.
    """
    if not isinstance(header, dict) or "format" not in header:
        raise DtemError("this is not a dtem adapter: its header has no dtem format. dtem.save_pretrained writes one")
    if type(header["format"]) is not int or not 1 <= header["format"] <= FORMAT:
        raise DtemError(
            f"the file has format {header['format']!r} (by dtem {header.get('version')}), dtem {__version__} reads "
            f"formats 1 to {FORMAT}: install the version that wrote it, or a newer one"
        )
    _check_types(header, _REQUIRED if header["format"] == 1 else {**_REQUIRED, "digest": (str,)})
    _check_types(header, {name: kinds for name, kinds in _OPTIONAL.items() if name in header})
    _check_types(header["host"], HOST_FIELDS, "host.")
    notes = header.get("notes", {})
    _check_types(notes, dict.fromkeys(notes, (str,)), "notes.")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise DtemError(f"tensor {name} is {tensor.dtype}; adapters hold floats or whole numbers")
    if header.get("digest", digest(tensors)) != digest(tensors):
        raise DtemError("the file is damaged: its tensors differ from those that were saved. Copy or download it again")
    return header


def _check_types(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], prefix: str = "") -> None:
    for name, allowed in kinds.items():
        value = values.get(name)
        if not isinstance(value, allowed) or isinstance(value, bool) or (name not in values):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            text = f"{prefix}{name} = {value!r:.80}, expected {expected}"
            raise DtemError(f"the dtem header is damaged: {text}. Copy or download the file again")


def from_older_version(header: Header, tensors: dict[str, Tensor]) -> tuple[Header, dict[str, Tensor]]:
    """The content of a file by its present names. The schedule stays: learned rates were stored as one r per block."""
    options = {_RENAMED_OPTIONS.get(name, name): value for name, value in header["options"].items()}
    if options.pop("learn_rates", None) is not None:
        options.pop("flops_weight", None)
        tensors = {name: part for name, part in tensors.items() if not name.startswith("rates.")}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return {**header, "method": _RENAMED_METHODS.get(header["method"], header["method"]), "options": options}, tensors
