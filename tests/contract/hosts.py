"""Tiny random hosts of every supported kind, and small helpers that the clauses share."""

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import dtem
import dtem.models
from dtem import integrations, methods
from dtem.methods import METHODS
from dtem.models.segmenter import MaskDecoder, Segmenter
from dtem.types import HostSpec

DEPTH = 4
R = 9


@dataclass(frozen=True)
class Host:
    """How to build a tiny model, and what it can do."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...] = (3, 32, 32)
    soft: bool = True
    """Whether its pooling allows soft merging."""
    doors: bool = True
    """Whether it has timm's other entry points (forward_features, …), and the shortcut in the last block."""


def vit(name: str = "vit_tiny_patch16_224", **settings: object) -> Callable[[], nn.Module]:
    tiny = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": DEPTH, "num_heads": 2, "num_classes": 5}
    return lambda: timm.create_model(name, **{**tiny, **settings})


def hf(name: str, **settings: object) -> Callable[[], nn.Module]:
    """A model of transformers, by the name of its class."""
    tiny = {"image_size": 32, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": DEPTH, "num_attention_heads": 2}

    def build() -> nn.Module:
        cls = getattr(transformers, name)
        return cls(cls.config_class(**{**tiny, "intermediate_size": 64, "num_labels": 5, **settings}))

    return build


def hf_naflex() -> nn.Module:
    """SigLIP 2 (NaFlex); an image of 32×32 has all of its 64 patches."""
    sizes = {"hidden_size": 32, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 64}
    config = {**sizes, "patch_size": 4, "num_patches": 64, "vision_use_head": True}
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**config))


def segmenter(**settings: object) -> Callable[[], nn.Module]:
    """A Segmenter with masks: its output has a value for every pixel."""
    return lambda: Segmenter(vit(**{**settings, "num_classes": 0})(), MaskDecoder(32, 5, depth=1, heads=2))


HOSTS: dict[str, Host] = {
    "deit": Host(vit("deit_tiny_patch16_224")),
    "distilled": Host(vit("deit_tiny_distilled_patch16_224")),
    "deit3": Host(vit("deit3_small_patch16_224")),
    "augreg": Host(vit("vit_small_patch16_384", mlp_ratio=3.0)),
    "mae": Host(vit(global_pool="avg")),
    "dinov2_registers": Host(vit("vit_small_patch14_reg4_dinov2", dynamic_img_size=True)),
    "qk_norm": Host(vit(qk_norm=True)),
    "no_qkv_bias": Host(vit(qkv_bias=False)),
    "siglip": Host(vit("vit_base_patch16_siglip_224")),
    "registers_only": Host(vit(class_token=False, reg_tokens=2, global_pool="avg")),
    "no_class_token": Host(vit(class_token=False, global_pool="avg", fc_norm=False)),
    "mean_with_prefix": Host(vit(global_pool="avg", pool_include_prefix=True)),
    "non_square": Host(vit(img_size=(32, 48)), image=(3, 32, 48)),
    "odd_grid": Host(vit(img_size=(28, 36)), image=(3, 28, 36)),
    "avgmax": Host(vit(global_pool="avgmax"), soft=False),
    "max": Host(vit(global_pool="max"), soft=False),
    "scale_norms": Host(vit(scale_attn_norm=True, scale_mlp_norm=True)),
    "clip": Host(vit("vit_base_patch32_clip_224")),
    "drop_path": Host(vit(drop_path_rate=0.4)),
    "lvvit": Host(vit("lvvit_s")),
    "eva": Host(vit("eva02_tiny_patch14_224"), doors=False),
    **{
        name: Host(vit(model), doors=False)
        for name, model in {
            "rope_mixed": "vit_small_patch16_rope_mixed_224",
            "timm_dinov3": "vit_small_patch16_dinov3",
            "perception": "vit_pe_core_tiny_patch16_384",
        }.items()
        if timm.is_model(model)  # the oldest timm has not all of them
    },
    "hf_vit": Host(hf("ViTForImageClassification"), doors=False),
    "hf_deit": Host(hf("DeiTForImageClassificationWithTeacher"), doors=False),
    "hf_dinov2": Host(hf("Dinov2WithRegistersForImageClassification", mlp_ratio=2), doors=False),
    "hf_siglip": Host(hf("SiglipVisionModel"), doors=False),
    "hf_clip": Host(hf("CLIPVisionModelWithProjection", projection_dim=5), doors=False),
    "hf_dinov3": Host(hf("DINOv3ViTModel", num_register_tokens=2), doors=False),
    "hf_siglip2": Host(hf_naflex, doors=False),
    "hf_aimv2": Host(hf("Aimv2VisionModel"), doors=False),
    "hf_internvl": Host(hf("InternVLVisionModel", image_size=[32, 32], patch_size=[4, 4]), doors=False),
    "hf_git": Host(hf("GitVisionModel"), doors=False),
    "hf_videomae": Host(
        hf("VideoMAEForVideoClassification", image_size=16, num_frames=8), image=(8, 3, 16, 16), doors=False
    ),
    "segmenter": Host(segmenter(), doors=False),
}
TIMM = [name for name, host in HOSTS.items() if host.doors]

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "evit_dropping": ("evit", {"fuse": False}),
}
"""Options that change what a method guarantees: tested like methods, on FEW hosts."""

EVERY_BLOCK: dict[str, Callable[[int], dict[str, object]]] = {
    "algm": lambda depth: {"stages": tuple(range(depth))},
    "dtps": lambda depth: {"stages": tuple(range(depth))},
    "dynamicvit": lambda depth: {"stages": tuple(range(depth))},
}
"""Options, by depth, that let methods reduce in every block which otherwise do so in a few only."""

FEW = ("distilled", "mae", "siglip", "dinov2_registers", "drop_path")
"""Hosts for clauses that cost more: two prefix tokens, mean pooling, attention pooling, registers, randomness."""

LIBRARIES = ("hf_dinov2", "hf_siglip", "segmenter")
"""Hosts of other integrations for such clauses."""

KINDRED = ("rope_mixed", "perception", "hf_aimv2", "hf_internvl")
"""Hosts much like others: by default with `dtem` alone."""

ON_EVERY_HOST = ("dtem", "tome")
"""Methods that are tested on every host; all others, with the same interface, on FEW hosts."""

BY_DEFAULT = ("distilled", "mae")
"""Of FEW, the hosts on which those others are tested by default; on the rest of FEW, by `make test-slow`."""

DENSE_ONLY = ("algm",)
"""Methods that only models for dense prediction support."""

CLASSIFYING = tuple(sorted(set(METHODS) - set(DENSE_ONLY)))
"""Methods that timm's classifiers can have."""


@functools.cache
def _template(name: str) -> nn.Module:
    torch.manual_seed(sum(map(ord, name)))
    return lively(HOSTS[name].build()).eval()


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Large random weights: the default initialisation (tiny class token, layer scale 1e-5) hides most mistakes."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            continue  # a temperature
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.normal_(1.0, 0.2)
        elif name.endswith("gamma"):
            parameter.normal_(0.7, 0.2)
        elif parameter.ndim == 1:
            parameter.normal_(0.0, 0.2)
        elif "token" in name or "embed" in name.split(".")[-1] or "latent" in name:
            parameter.normal_(0.0, 0.7)
        else:
            parameter.normal_(0.0, 1.3 * parameter[0].numel() ** -0.5)
    return model


def fresh(name: str) -> nn.Module:
    """A copy of the tiny host `name`, always with the same weights, in eval mode."""
    return copy.deepcopy(_template(name))


def images(name: str, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, *HOSTS[name].image, generator=torch.Generator().manual_seed(seed))


@functools.cache
def built(method: str) -> methods.Method:
    return patched("segmenter" if method in DENSE_ONLY else "deit", method)[1].method


@functools.cache
def form(name: str, method: str) -> type[methods.Method]:
    """The class of the method for this host: its dense variant for dense prediction."""
    real, _ = VARIANTS.get(method, (method, {}))
    return methods.find(real, dense=described(name).dense)


@functools.cache
def described(name: str) -> HostSpec:
    return integrations.find(_template(name)).describe(_template(name))


def records(handle: dtem.Handle) -> list[int]:
    """Number of tokens in each record of a trace: one of every block, or of every component if blocks reset."""
    if not handle.method.resets_each_block:
        return list(handle.tokens)
    return [handle.host.prefix + handle.host.patches - r for r in handle.plan for _ in ("attention", "mlp")]


@functools.cache
def provided(name: str) -> frozenset[str]:
    """What the host and its integration provide."""
    integration = integrations.find(_template(name))
    return integration.provides | described(name).provides


def pairs(names: Iterable[str] = HOSTS, fitting: bool = True) -> list[tuple[str, str]]:
    """Supported pairs of host and method, or the unsupported ones."""
    some = {name: (*ON_EVERY_HOST, *(DENSE_ONLY if name == "segmenter" else ())) for name in HOSTS}
    return [
        (name, method)
        for name in names
        for method in ([*METHODS, *VARIANTS] if name in FEW else some[name])
        if (form(name, method).needs <= provided(name)) == fitting
    ]


def _by_default(name: str, method: str) -> bool:
    if name in KINDRED:
        return method == "dtem"
    return method in ON_EVERY_HOST or name in BY_DEFAULT or name not in FEW


def every(names: Iterable[str] = HOSTS, soft: bool = False, whole: bool | None = None) -> pytest.MarkDecorator:
    """Parametrise a clause by all supported hosts and methods; with `soft`, by those with a soft mode; with `whole`, by
    those that drop no patch (True) or do (False)."""
    cases = [
        pytest.param(name, method, id=f"{name}-{method}", marks=[] if _by_default(name, method) else pytest.mark.slow)
        for name, method in pairs(names)
        if not soft or (HOSTS[name].soft and built(method).has_soft_mode())
        if whole in (None, built(method).conserves_size)
    ]
    return pytest.mark.parametrize(("name", "method"), cases)


def ask(model: nn.Module, x: Tensor) -> Tensor:
    """The output of the model as one tensor."""
    return integrations.as_logits_fn(model)(x)


def patched(name: str, method: str, r: object = R, **options: object) -> tuple[nn.Module, dtem.Handle]:
    model = fresh(name)
    return model, patch(model, method, r, **options)


def patch(model: nn.Module, method: str, r: object = R, **options: object) -> dtem.Handle:
    """`dtem.patch`, with the name of a method or of a variant."""
    real, settings = VARIANTS.get(method, (method, {}))
    if real in EVERY_BLOCK:
        settings = {**EVERY_BLOCK[real](len(getattr(model, "encoder", model).blocks)), **settings}
    return dtem.patch(model, real, r, **{**settings, **options})


def alike(got: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two gradients are equal; weights that do not affect the output have none."""
    return got is None if expected is None else got is not None and torch.equal(got, expected)


def gradients(model: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output and the gradient of every parameter, for a loss with a different weight for each logit."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = ask(model, x)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
