"""Host families by name. To add one: write its file, add its line here."""

import importlib
import sys

from torch import nn

from dtem.adapters.base import Adapter, Merger, Trace, auxiliary, tracing
from dtem.types import DtemError

ADAPTERS = {
    "hf_clip": "dtem.adapters.hf_clip:HfClip",
    "hf_git": "dtem.adapters.hf_git:HfGit",
    "hf_siglip": "dtem.adapters.hf_siglip:HfSiglip",
    "hf_vit": "dtem.adapters.hf_vit:HfVit",
    "segmenter": "dtem.adapters.segmenter:SegmenterAdapter",
    "timm_vit": "dtem.adapters.timm_vit:TimmVit",
}
ORIGINS = {
    "hf_clip": "transformers",
    "hf_git": "transformers",
    "hf_siglip": "transformers",
    "hf_vit": "transformers",
    "segmenter": "dtem.hosts.segmenter",
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
    listed = "; ".join(supported) or "timm VisionTransformer models (install and import timm)"
    raise DtemError(f"{type(model).__name__} is not supported. Supported: {listed}")


def asked(model: nn.Module) -> nn.Module:
    """The model as a function of images that gives one tensor: logits, or pooled features where it has no classifier.
    Most models are that; those of transformers are wrapped."""
    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        wrapped: nn.Module = importlib.import_module("dtem.adapters.hf").Asked(model)
        return wrapped
    return model


__all__ = ["ADAPTERS", "Adapter", "Merger", "Trace", "asked", "auxiliary", "find", "load", "tracing"]
