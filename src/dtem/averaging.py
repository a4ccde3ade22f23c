"""The mean of several adapters: one that may be better than each of them, and costs no more.

Embeddings that start from the keys of one host, and learn with other seeds or by another relaxation, err in different
directions; in their mean much of that cancels out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from dtem import schedule as schedules
from dtem import storage
from dtem._version import __version__
from dtem.files import write_file
from dtem.types import DtemError


def average(sources: Sequence[storage.Source], path: storage.Source) -> storage.Header:
    """Write the mean of the adapters `sources` (files, shipped names or Hub ids) to `path`; returns its header.

    They must be of one method, for one host and of one shape, and must not have started at random. Options and schedule
    are those of the first; the photographs that it must not be judged on are those of all.
    """
    if len(sources) < 2:
        raise DtemError(f"a mean needs two adapters or more, not {len(sources)}")
    if Path(path).is_dir():
        raise DtemError(f"{path} is a folder; name a file in it, such as {Path(path) / storage.FILE}")
    headers, parts = [], []
    for source in sources:
        found = storage.locate(source, None)
        try:
            header, tensors = storage.read(found)
            storage.check_finite(tensors)
            if header["options"].get("init") == "random":
                raise DtemError("it started at random, so it has no more in common with others than its shape")
            if headers:
                _check_alike(headers[0], parts[0], header, tensors)
        except DtemError as error:
            raise DtemError(f"{found}: {error}") from error
        headers.append(header)
        parts.append(tensors)
    mean = {name: _mean([tensors[name] for tensors in parts]) for name in parts[0]}
    rates = {header.get("trained_r") for header in headers}
    kept = {key: value for key, value in headers[0].items() if key != "adaptive"}  # thresholds are of one adapter
    if isinstance(schedules.parse(kept["schedule"]), schedules.Threshold):
        kept["schedule"] = "0"
    kept |= {
        "version": __version__,
        "trained_r": rates.pop() if len(rates) == 1 else None,
        "notes": _notes(headers),
    }
    write_file(path, to_bytes(mean, {"dtem": json.dumps(kept)}))
    return kept


def _check_alike(
    first: storage.Header, tensors: dict[str, Tensor], other: storage.Header, others: dict[str, Tensor]
) -> None:
    for name, own, theirs in (
        ("method", first["method"], other["method"]),
        ("host", first["host"], other["host"]),
        ("option seed", first["options"].get("seed"), other["options"].get("seed")),  # that is: where it started
    ):
        if own != theirs:
            raise DtemError(f"its {name} is {theirs}, that of the first adapter {own}")
    if {name: part.shape for name, part in tensors.items()} != {name: part.shape for name, part in others.items()}:
        raise DtemError("its tensors have other names or shapes than those of the first adapter")


def _mean(parts: list[Tensor]) -> Tensor:
    if parts[0].is_floating_point():
        return torch.stack([part.double() for part in parts]).mean(0).to(parts[0].dtype)
    if any(not part.equal(parts[0]) for part in parts):
        raise DtemError("the adapters hold whole numbers that differ, and have no mean")
    return parts[0]


def _notes(headers: list[storage.Header]) -> dict[str, str]:
    """What each said of itself, and the photographs of all."""
    said = [dict(header.get("notes") or {}) for header in headers]
    files = {name for header in headers for name in storage.trained_on(header)}
    for notes in said:
        notes.pop("trained_on", None)
    mean_of = {"mean_of": json.dumps(said)}
    return mean_of | ({"trained_on": json.dumps(sorted(files))} if files else {})
