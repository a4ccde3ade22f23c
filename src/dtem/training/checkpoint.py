"""Where a run stands: written whole or not at all, read without unpickling anything but tensors and numbers."""

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtem.files import write_file
from dtem.types import DtemError

FORMAT = 1
FILE = "last.pt"

State = dict[str, Any]


def fingerprint(model: nn.Module) -> str:
    """Of all its tensors: a run goes on only from the weights that it began with."""
    digest = hashlib.blake2b(digest_size=16)
    for name, part in model.state_dict().items():
        digest.update(name.encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the run's checkpoint."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_file(folder / FILE, buffer.getvalue())


def load(folder: Path) -> State | None:
    """The run's checkpoint, or None where there is none yet."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DtemError(f"{path} is damaged or no checkpoint ({first}); move it away or add --restart") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DtemError(f"{path} is no checkpoint that this version reads; move it away or add --restart")
    return state


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """A run goes on only with the settings that it began with."""
    free = {"workers", "save_every", "log", "out"}
    for name in now.keys() - free:
        if saved.get(name) != now[name]:
            raise DtemError(
                f"{folder} holds a run with {name} = {saved.get(name)!r}, and you ask for {now[name]!r}: take the same "
                "settings to go on with it, another --out for a new run, or --restart to begin it anew"
            )
