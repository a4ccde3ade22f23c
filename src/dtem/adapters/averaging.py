"""The mean of several adapters: one that may be better than each of them, and costs no more.

Embeddings that start from the keys of one host, and learn with other seeds or by another relaxation, err in different
directions; in their mean much of that cancels out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dtem._version import __version__
from dtem.adapters import storage
from dtem.adapters.header import Header
from dtem.adapters.locate import FILE, Source, locate
from dtem.errors import DtemError


def average_adapters(sources: Sequence[Source], path: Source) -> Header:
    """Write the mean of several adapters as one adapter; returns its header.

    They must be of one method, for one model, of one shape, and initialised from the keys. Options and schedule are
    those of the first, the listed training images are those of all.

    Args:
        sources: files, shipped names or Hub ids.
        path: the file to write.

    Examples:
        >>> dtem.average_adapters(["a.safetensors", "b.safetensors"], "mean.safetensors")
    """
    if len(sources) < 2:
        raise DtemError(f"a mean needs two adapters or more, not {len(sources)}")
    if Path(path).is_dir():
        raise DtemError(f"{path} is a folder; name a file in it, such as {Path(path) / FILE}")
    headers: list[Header] = []
    parts: list[dict[str, Tensor]] = []
    for source in sources:
        file = locate(source)
        try:
            header, tensors = storage.read(file)
            storage.check_finite(tensors)
            if header["options"].get("init") == "random":
                raise DtemError("it started at random, so it has no more in common with others than its shape")
            if headers:
                _check_alike(headers[0], parts[0], header, tensors)
        except DtemError as error:
            raise DtemError(f"{file}: {error}") from error
        headers.append(header)
        parts.append(tensors)
    mean = {name: _mean([tensors[name] for tensors in parts]) for name in parts[0]}
    rates = {header.get("trained_r") for header in headers}
    header = headers[0] | {
        "version": __version__,
        "trained_r": rates.pop() if len(rates) == 1 else None,
        "notes": _notes(headers),
    }
    return storage.write(path, header, mean)


def _check_alike(first: Header, tensors: dict[str, Tensor], other: Header, others: dict[str, Tensor]) -> None:
    for name, own, theirs in (
        ("method", first["method"], other["method"]),
        ("host", first["host"], other["host"]),
        ("option seed", first["options"].get("seed"), other["options"].get("seed")),  # that is: where it started
    ):
        if own != theirs:
            raise DtemError(f"its {name} is {theirs}, that of the first adapter {own}")
    if _shapes(tensors) != _shapes(others):
        raise DtemError("its tensors have other names or shapes than those of the first adapter")


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (part.shape, part.is_floating_point()) for name, part in tensors.items()}


def _mean(parts: list[Tensor]) -> Tensor:
    if parts[0].is_floating_point():
        return torch.stack([part.double() for part in parts]).mean(0).to(parts[0].dtype)
    if any(not part.equal(parts[0]) for part in parts):
        raise DtemError("the adapters hold whole numbers that differ, and have no mean")
    return parts[0]


def _notes(headers: list[Header]) -> dict[str, str]:
    """The notes of each adapter, and the training files of all."""
    each_notes = [dict(header.get("notes", {})) for header in headers]
    files = {name for header in headers for name in storage.trained_on(header)}
    for notes in each_notes:
        notes.pop("trained_on", None)
    mean_of = {"mean_of": json.dumps(each_notes)}
    return mean_of | ({"trained_on": json.dumps(sorted(files))} if files else {})
