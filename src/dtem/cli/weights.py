"""Loading a host's weights from a file, without running code from it."""

import argparse
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dtem.types import DtemError

_SHOWN = 3


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load every weight of `model` from `path`; nothing may be missing, left over or of another shape."""
    path = Path(path)
    state = _without_head(model, _as_timm(model, _unwrap(_read(path), path), path))
    problems = _problems(model.state_dict(), state)
    if problems:
        raise DtemError(f"{path.name} does not fit the model: {'; '.join(problems)}{_hint(model, state)}")
    model.load_state_dict(state)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise DtemError(f"there is no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # official checkpoints carry their arguments
            return torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise DtemError(f"{path.name} is damaged or no safetensors file: {error}") from error
    except pickle.UnpicklingError as error:
        raise DtemError(
            f"{path.name} is damaged, or holds more than tensors, and is not opened since it could run code. "
            "Save the model's state_dict alone (best as .safetensors) and use that file."
        ) from error
    except Exception as error:  # a damaged file can break torch's reader anywhere
        raise DtemError(f"{path.name} is damaged or no torch file: {error!r:.200}") from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict, out of the dict that training scripts save around it."""
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise DtemError(f"{path.name} holds no weights: found {type(content).__name__}, expected a state dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DtemError(f"{path.name} is no state dict: {name!r} is a {type(value).__name__}, not a tensor")
    return dict(content)


def _as_timm(model: nn.Module, state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The state dict with today's timm names and shapes (older names, resized position embeddings)."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        return dict(convert(state, model))
    except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise DtemError(f"{path.name} does not fit the model: timm cannot convert it ({error!r})") from error


def _without_head(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model without classes (``--classes 0``) gives features: what a file has for its classifier is left out."""
    if getattr(model, "num_classes", None) != 0:
        return state
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    heads = tuple(f"{name}." for name in ((named,) if isinstance(named, str) else named))
    return {name: tensor for name, tensor in state.items() if not name.startswith(heads)}


def _problems(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    other = [
        f"{name} is {tuple(found[name].shape)}, the model's {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    return [
        f"{what} {_listed(names)}"
        for what, names in (
            ("missing", [name for name in wanted if name not in found]),
            ("unknown", [name for name in found if name not in wanted]),
            ("other shapes:", other),
        )
        if names
    ]


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _hint(model: nn.Module, found: Mapping[str, Tensor]) -> str:
    """The usual ways out."""
    wanted = model.state_dict()
    if "fc_norm.weight" in found and "fc_norm.weight" not in wanted:
        return ". These are weights of a mean-pooled model (MAE): add --pool avg"
    if "fc_norm.weight" in wanted and "norm.weight" in found and "fc_norm.weight" not in found:
        return ". These are weights of a class-token model: add --pool token"
    head = found.get("head.weight")
    if head is not None and "head.weight" in wanted and head.shape[0] != wanted["head.weight"].shape[0]:
        return f". The file has {head.shape[0]} classes: add --classes {head.shape[0]}"
    return ". Check the model's name and options"
