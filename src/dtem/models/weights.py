"""Loading a model's weights from a file, without running code from it."""

import argparse
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dtem.errors import DtemError

_LISTED = 3


def load_weights(model: nn.Module, path: str | os.PathLike[str], part: str = "") -> None:
    """Load every weight of `model` from a file; nothing may be missing, left over or of another shape.

    `part`: the file holds this part of the model alone (``encoder.``), and the rest stays. If anything does not fit,
    the whole model stays as it was.
    """
    state = {f"{part}{name}": tensor for name, tensor in read_state_dict(path).items()}
    if part:
        state |= {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(part)}
    state = _without_head(model, _converted(model, state, Path(path).name))
    check_fit(model, state, Path(path).name)
    model.load_state_dict(state)


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors or torch file, also if a training script saved them inside a larger dict."""
    path = Path(path)
    content = _read(path)
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise DtemError(f"{path.name} holds no weights: it is a {type(content).__name__}, expected a state dict")
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DtemError(f"{path.name} is not a state dict: {name!r} is a {type(value).__name__}, not a tensor")
    return dict(content)


def check_fit(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Refuse a state dict with missing or unknown weights or other shapes; the message names them and the way out."""
    expected = model.state_dict()
    shapes = [
        f"{name} is {tuple(state[name].shape)}, the model's {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    problems = [
        f"{problem} {_listed(names)}"
        for problem, names in (
            ("missing", [name for name in expected if name not in state]),
            ("unknown", [name for name in state if name not in expected]),
            ("other shapes:", shapes),
        )
        if names
    ]
    if problems:
        raise DtemError(f"{source} does not fit the model: {'; '.join(problems)}. {_hint(expected, state)}")


def _read(path: Path) -> Any:
    if not path.is_file():
        raise DtemError(f"there is no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # official checkpoints carry their arguments
            return torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise DtemError(f"{path.name} is damaged or not a safetensors file: {error}") from error
    except pickle.UnpicklingError as error:
        raise DtemError(
            f"{path.name} is damaged, or holds more than tensors, and is not opened since it could run code. "
            "Save the model's state_dict alone (best as .safetensors) and use that file."
        ) from error
    except Exception as error:  # a damaged file can break torch's reader anywhere
        raise DtemError(f"{path.name} is damaged or not a torch file: {error!r:.200}") from error


def _converted(model: nn.Module, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """The state dict by the ``checkpoint_filter_fn`` of the model's module (older names, resized positions)."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        return dict(convert(state, model))
    except DtemError as error:
        raise DtemError(f"{source}: {error}") from error
    except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise DtemError(f"{source} does not fit the model: timm cannot convert it ({error!r})") from error


def _without_head(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """For a model without a head (``num_classes=0``), the state dict without the file's classifier."""
    if getattr(model, "num_classes", None) != 0:
        return state
    classifier = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    prefixes = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _hint(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """The usual ways out."""
    if "fc_norm.weight" in state and "fc_norm.weight" not in expected:
        return "These are weights of a mean-pooled model (MAE): add global_pool = 'avg'"
    if "fc_norm.weight" in expected and "norm.weight" in state and "fc_norm.weight" not in state:
        return "These are weights of a class-token model: add global_pool = 'token'"
    head = state.get("head.weight")
    if head is not None and "head.weight" in expected and head.shape[0] != expected["head.weight"].shape[0]:
        return f"The file has {head.shape[0]} classes: add num_classes = {head.shape[0]}"
    return "Check the model's name and options"
