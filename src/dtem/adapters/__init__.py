"""Host families by name. To add one: write its file, add its line here."""

import importlib
import sys

from torch import nn

from dtem.adapters.base import Adapter, Auxiliary, Merger, Trace, auxiliary, tracing
from dtem.types import DtemError

ADAPTERS = {
    "hf_clip": "dtem.adapters.hf_clip:HfClip",
    "hf_git": "dtem.adapters.hf_git:HfGit",
    "hf_siglip": "dtem.adapters.hf_siglip:HfSiglip",
    "hf_vit": "dtem.adapters.hf_vit:HfVit",
    "segmenter": "dtem.adapters.segmenter:SegmenterAdapter",
    "timm_eva": "dtem.adapters.timm_eva:TimmEva",
    "timm_vit": "dtem.adapters.timm_vit:TimmVit",
}
ORIGINS = {
    "hf_clip": "transformers",
    "hf_git": "transformers",
    "hf_siglip": "transformers",
    "hf_vit": "transformers",
    "segmenter": "dtem.hosts.segmenter",
    "timm_eva": "timm",
    "timm_vit": "timm",
}
"""The module that the models of a family come from."""


def load(family: str) -> Adapter:
    """The adapter of a host family."""
    module, cls = ADAPTERS[family].split(":")
    adapter: Adapter = getattr(importlib.import_module(module), cls)()
    return adapter


def find(model: nn.Module) -> Adapter:
    """The adapter that speaks to `model`. Libraries that the model cannot come from are not imported."""
    if not isinstance(model, nn.Module):
        raise DtemError(f"{model!r} is a {type(model).__name__}, not a model (torch.nn.Module)")
    supported = []
    for family in ADAPTERS:
        if ORIGINS[family] in sys.modules:
            adapter = load(family)
            reason = adapter.refusal(model)
            if reason is None:
                return adapter
            if reason:
                raise DtemError(f"{type(model).__name__} is not supported: {reason}. Supported: {adapter.supported}")
            supported.append(adapter.supported)
    reason = fixed_places(model)
    why = f": {reason}" if reason else ""
    listed = "; ".join(supported) or "timm VisionTransformer models (install and import timm)"
    raise DtemError(f"{type(model).__name__} is not supported{why}. Supported: {listed}")


def fixed_places(model: nn.Module) -> str | None:
    """Why a model that no adapter takes could not be taken: its attention goes by where patches are."""
    named = [module for module in model.modules() if getattr(module, "window_size", None) is not None]
    if any("Window" in type(module).__name__ or hasattr(module, "shift_size") for module in named):
        return "its attention works in windows, which every patch has its place in; merged patches would leave holes"
    if any(getattr(module, "relative_position_bias_table", None) is not None for module in model.modules()):
        return (
            "its attention adds a bias that belongs to a pair of places, and a merged token is in several; the mean "
            "over them is a matrix for every image and head, which costs what merging saves and is not what was learned"
        )
    return None


def asked(model: nn.Module) -> nn.Module:
    """The model as a function of images that gives one tensor: logits, or pooled features where it has no classifier.
    Most models are that; those of transformers are wrapped."""
    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        wrapped: nn.Module = importlib.import_module("dtem.adapters.hf").Asked(model)
        return wrapped
    return model


__all__ = ["ADAPTERS", "Adapter", "Auxiliary", "Merger", "Trace", "asked", "auxiliary", "find", "load", "tracing"]
