"""Weights for a Segmenter: published checkpoints, files of timm for its encoder. Nothing is ever unpickled."""

import math
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dtem.hosts.segmenter import Segmenter, build_decoder, plain_encoder, resize_positions
from dtem.types import DtemError

Weights = Mapping[str, Tensor] | str | os.PathLike[str]
CLASSIFIER = re.compile(r"(head|head_dist|pre_logits)\.")
"""What a published encoder has and a Segmenter does not use."""


def from_checkpoint(source: Weights, name: str = "") -> Segmenter:
    """The model that a published checkpoint holds: sizes, decoder and classes are read off the shapes.

    `source` is a file (``{"model": weights, …}`` as published, or weights alone, also as safetensors), or the weights.
    """
    found = read(source)
    try:
        positions, patches = found["encoder.pos_embed"], found["encoder.patch_embed.proj.weight"]
        linear = "decoder.head.weight" in found
        classes = found["decoder.head.weight"].shape[0] if linear else found["decoder.cls_emb"].shape[1]
    except (KeyError, IndexError) as error:
        raise DtemError(f"{_called(source)} is no Segmenter: it lacks {error}") from None
    width, patch = patches.shape[0], patches.shape[-1]
    distilled = "encoder.dist_token" in found
    side = math.isqrt(positions.shape[1]) * patch  # one or two prefix tokens do not change the root
    encoder = plain_encoder(width, _depth(found, "encoder"), patch, (side, side), distilled=distilled)
    decoder = build_decoder("linear" if linear else "mask", width, classes, _depth(found, "decoder"))
    return load_weights(Segmenter(encoder, decoder, name), found)


def load_weights(model: Segmenter, source: Weights) -> Segmenter:
    """Fill the model; position embeddings of another grid are resized. If anything does not fit, it stays as it was."""
    found = {name: value for name, value in read(source).items() if not CLASSIFIER.match(name.removeprefix("encoder."))}
    return _fill(model, found, _called(source))


def load_encoder(model: Segmenter, source: Weights) -> Segmenter:
    """Fill the encoder alone, from weights of timm's model of the same name (its classifier is left out)."""
    found = {f"encoder.{name}": value for name, value in read(source).items() if not CLASSIFIER.match(name)}
    own = {name: value for name, value in model.state_dict().items() if name.startswith("decoder.")}
    return _fill(model, {**found, **own}, _called(source))


def read(source: Weights) -> Mapping[str, Tensor]:
    """Tensors by name."""
    if isinstance(source, Mapping):
        found: object = source
    else:
        try:
            if Path(source).suffix == ".safetensors":
                found = load_file(source)
            else:
                found = torch.load(source, map_location="cpu", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DtemError(f"{source} cannot be read as weights: {error}") from error
    inner = found.get("model", found) if isinstance(found, Mapping) else None
    if not isinstance(inner, Mapping) or not inner or not all(isinstance(value, Tensor) for value in inner.values()):
        raise DtemError(f"{_called(source)} does not hold tensors by name, nor such under the key 'model'")
    return inner


def _fill(model: Segmenter, found: Mapping[str, Tensor], called: str) -> Segmenter:
    wanted = model.state_dict()
    filled = {**found}
    key = "encoder.pos_embed"
    if key in found and found[key].shape != wanted[key].shape:
        filled[key] = _fit_positions(model, found[key], called)
    for what, names in (("lacks", wanted.keys() - filled.keys()), ("has unknown", filled.keys() - wanted.keys())):
        if names:
            listed = ", ".join(sorted(names)[:5])
            raise DtemError(f"{called} {what} weights: {listed}{f' and {len(names) - 5} more' * (len(names) > 5)}")
    for name, value in wanted.items():
        if filled[name].shape != value.shape:
            raise DtemError(f"{called}: {name} is {tuple(filled[name].shape)}, the model has {tuple(value.shape)}")
    model.load_state_dict(filled)
    return model


def _fit_positions(model: Segmenter, positions: Tensor, called: str) -> Tensor:
    encoder = model.encoder
    prefix = 0 if encoder.no_embed_class else encoder.num_prefix_tokens
    side = math.isqrt(max(positions.shape[1] - prefix, 0)) if positions.ndim == 3 else 0
    if not side or side * side != positions.shape[1] - prefix:
        raise DtemError(
            f"{called}: encoder.pos_embed of shape {tuple(positions.shape)} is no square grid after {prefix} prefix "
            "tokens"
        )
    return resize_positions(positions.float(), (side, side), encoder.patch_embed.grid_size, prefix)


def _depth(found: Mapping[str, Tensor], part: str) -> int:
    return len({name.split(".")[2] for name in found if name.startswith(f"{part}.blocks.")})


def _called(source: Weights) -> str:
    return "the state dict" if isinstance(source, Mapping) else os.fspath(source)
