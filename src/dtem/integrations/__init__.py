"""Host families: one file each, or registered by a user (`register_integration`)."""

import contextlib
import importlib
from typing import TypeVar

from torch import nn

from dtem.errors import DtemError
from dtem.integrations import affine
from dtem.integrations.base import Integration, Merger, is_fully_sharded
from dtem.integrations.recording import AuxiliaryLosses, Trace
from dtem.registry import Registry

INTEGRATIONS = Registry(
    "host family",
    {
        "hf_aimv2": "dtem.integrations.hf_aimv2:HfAimv2",
        "hf_clip": "dtem.integrations.hf_clip:HfClip",
        "hf_dinov3": "dtem.integrations.hf_dinov3:HfDinoV3",
        "hf_git": "dtem.integrations.hf_git:HfGit",
        "hf_internvl": "dtem.integrations.hf_internvl:HfInternVL",
        "hf_siglip": "dtem.integrations.hf_clip:HfSiglip",
        "hf_siglip2": "dtem.integrations.hf_siglip2:HfSiglip2",
        "hf_videomae": "dtem.integrations.hf_videomae:HfVideoMAE",
        "hf_vit": "dtem.integrations.hf_vit:HfVit",
        "hf_vlm": "dtem.integrations.hf_vlm:HfVlm",
        "hf_vlm_dense": "dtem.integrations.hf_vlm_dense:HfVlmDense",
        "segmenter": "dtem.integrations.segmenter:SegmenterIntegration",
        "timm_eva": "dtem.integrations.timm_eva:TimmEva",
        "timm_vit": "dtem.integrations.timm_vit:TimmVit",
    },
    "dtem.integrations",
)
ORIGINS = {
    "hf_aimv2": "transformers",
    "hf_clip": "transformers",
    "hf_dinov3": "transformers",
    "hf_git": "transformers",
    "hf_internvl": "transformers",
    "hf_siglip": "transformers",
    "hf_siglip2": "transformers",
    "hf_videomae": "transformers",
    "hf_vit": "transformers",
    "hf_vlm": "transformers",
    "hf_vlm_dense": "transformers",
    "segmenter": "dtem.models.segmenter",
    "timm_eva": "timm",
    "timm_vit": "timm",
}
"""The package that the models of a built-in family are defined in. A family is imported only for such models."""
SUPPORTED = {
    "transformers": (
        "transformers ViT, DeiT, DINOv2 (with registers), DINOv3, CLIP, SigLIP, SigLIP 2, AIMv2, InternViT, GIT and "
        "VideoMAE, and the vision-language models PaliGemma, LLaVA, LLaVA-NeXT, LLaVA-OneVision, Gemma 3, Idefics3 and "
        "SmolVLM"
    ),
    "dtem.models.segmenter": "Segmenter models of dtem.models.segmenter",
    "timm": "timm VisionTransformer (deit_*, vit_* including AugReg, MAE, DINOv2, CLIP and SigLIP) and Eva models "
    "(EVA-02, DINOv3, vit_*_rope_*, Perception Encoder)",
}

REFUSED = {
    ("hiera", "sam2"): (
        "it pools neighbouring patches between its stages, in fixed units of the grid, and a merged patch is in several"
    ),
    ("vision_transformer_sam", "sam", "sam_hq"): (
        "its attention works in windows of neighbouring patches, and adds a bias for the relative position of two "
        "patches; merged patches have no window and several positions"
    ),
    ("internvl",): (
        "it takes neighbouring patches together after its vision encoder (pixel shuffle), which needs the whole grid; "
        "the encoder alone can be patched: load it as InternVLVisionModel"
    ),
}
"""Why models of these modules of timm and transformers cannot be supported."""

I = TypeVar("I", bound=type[Integration])  # noqa: E741 - as short as M of methods


def register_integration(cls: I) -> I:
    """Register the integration of a host family of your own: as a decorator, or by a call.

    A package can register it without code: by an entry point ``family = "module:Class"`` in the group
    ``dtem.integrations``.

    Args:
        cls: a subclass of `dtem.integrations.Integration`; its `refusal` decides which models it supports.

    Examples:
        >>> @dtem.register_integration
        ... class MyIntegration(Integration):
        ...     family = "mine"
        ...     # attach, describe, detach, key_projections, refusal: see docs/extending.md
        >>> handle = dtem.patch(MyViT(), r=8)  # doctest: +SKIP
    """
    INTEGRATIONS.register(cls.family, cls)
    return cls


def load(family: str) -> Integration:
    """The integration of a host family."""
    try:
        integration: Integration = INTEGRATIONS[family]()
    except ImportError as error:
        if ORIGINS.get(family) != "transformers":
            raise
        raise DtemError(
            f"this model of transformers needs transformers 5.18 or newer: pip install 'transformers>=5.18' ({error})"
        ) from error
    return integration


def attach(model: nn.Module, merger: Merger) -> None:
    """Patch `model`, in place."""
    load(merger.family).attach(model, merger)
    affine.attach(model, merger)


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    merger = model.dtem
    assert isinstance(merger, Merger)
    if is_fully_sharded(model):
        raise DtemError(
            f"{type(model).__name__} was changed after patching (fully_shard, …), so it cannot be unpatched"
        )
    affine.detach(model)
    load(merger.family).detach(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel, DistributedDataParallel or PEFT, which run it as it is patched."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif any(cls.__module__.startswith("peft.") for cls in type(model).__mro__):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def find(model: nn.Module) -> Integration:
    """The integration that supports `model`. Libraries that the model cannot come from are not imported."""
    if not isinstance(model, nn.Module):
        raise DtemError(f"{model!r} is a {type(model).__name__}, not a model (torch.nn.Module)")
    if any(map(is_fully_sharded, model.modules())):
        raise DtemError(f"{type(model).__name__} is sharded already: call dtem.patch before fully_shard")
    modules = [cls.__module__ for cls in type(model).__mro__]
    supported = list(SUPPORTED.values())
    for family in INTEGRATIONS:
        origin = ORIGINS.get(family)
        if origin is not None and not any(f"{module}.".startswith(f"{origin}.") for module in modules):
            continue
        integration = load(family)
        reason = integration.refusal(model)
        if reason is None:
            return integration
        listed = integration.supported or family
        if reason:
            raise DtemError(f"{type(model).__name__} is not supported: {reason}. Supported: {listed}")
        if origin is None:
            supported.append(listed)
    refused = _refusal_by_module(model)
    for name, module in model.named_modules() if refused is None else ():
        if name and type(module).__module__.startswith(tuple(ORIGINS.values())) and _is_supported(module):
            raise DtemError(
                f"{type(model).__name__} is not a model that dtem knows, but it holds one: patch "
                f"model.get_submodule({name!r}), a {type(module).__name__}"
            )
    reason = refused or _position_dependence(model)
    why = f": {reason}" if reason else ""
    raise DtemError(f"{type(model).__name__} is not supported{why}. Supported: {'; '.join(supported)}")


def _is_supported(module: nn.Module) -> bool:
    try:
        find(module)
    except DtemError:
        return False
    return True


def _refusal_by_module(model: nn.Module) -> str | None:
    """Why the models of this one's module cannot be supported (`REFUSED`)."""
    places = {part for cls in type(model).__mro__ for part in cls.__module__.split(".")}
    return next((reason for names, reason in REFUSED.items() if places & set(names)), None)


def _position_dependence(model: nn.Module) -> str | None:
    """Why a model of no known family cannot be supported: its attention depends on patch positions."""
    windowed = [module for module in model.modules() if getattr(module, "window_size", None) is not None]
    if any("Window" in type(module).__name__ or hasattr(module, "shift_size") for module in windowed):
        return "its attention works in windows of neighbouring patches, and merged patches have no window"
    if any(getattr(module, "relative_position_bias_table", None) is not None for module in model.modules()):
        return (
            "its attention adds a relative position bias, one number for each pair of positions, and a merged token "
            "has several positions; a mean over them would cost as much as merging saves"
        )
    return None


def is_transformers(model: nn.Module) -> bool:
    """Whether the class of a model comes from transformers, patched or not."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def traceable(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, a patched model can be exported as a graph without what its library adds for graphs alone."""
    if not is_transformers(model):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = importlib.import_module(
        "dtem.integrations.hf_tracing"
    ).without_masks(model)
    return context


def as_logits_fn(model: nn.Module) -> nn.Module:
    """The model as a function from images to one tensor: logits, or pooled features if it has no classifier.

    Models of transformers are wrapped; others are returned as they are.
    """
    if is_transformers(model):
        wrapped: nn.Module = importlib.import_module("dtem.integrations.hf_logits").LogitsModel(model)
        return wrapped
    return model


__all__ = [
    "INTEGRATIONS",
    "AuxiliaryLosses",
    "Integration",
    "Merger",
    "Trace",
    "as_logits_fn",
    "attach",
    "detach",
    "find",
    "is_fully_sharded",
    "is_transformers",
    "load",
    "register_integration",
    "traceable",
    "unwrap",
]
