"""What is supported, and the paper's models with what merging at the paper's r saves.

Every other model of these families works as well: `dtem flops NAME` says so, for transformers `dtem flops hf:NAME`.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from dtem.cli import common
from dtem.cli.bench import progress

NAME = "models"
HELP = "list supported families and the paper's models"
EXAMPLES = """\
examples:
  dtem models
  dtem models --json
"""


class Preset(NamedTuple):
    """A model to list."""

    title: str
    name: str
    pool: str | None
    """None: it has one way of its own."""
    r: int
    """At which the paper trains it; for others, what removes about as large a part of their tokens."""


PRESETS = (
    Preset("DeiT-T", "deit_tiny_patch16_224", "token", 16),
    Preset("DeiT-S", "deit_small_patch16_224", "token", 16),
    Preset("DeiT-B", "deit_base_patch16_224", "token", 16),
    Preset("AugReg ViT-S 384", "vit_small_patch16_384", "token", 48),
    Preset("LV-ViT-S", "lvvit_s", None, 14),
    Preset("MAE-B", "vit_base_patch16_224", "avg", 16),
    Preset("MAE-L", "vit_large_patch16_224", "avg", 8),
)
OTHERS = (
    Preset("DINOv2-S, registers", "vit_small_patch14_reg4_dinov2", None, 112),
    Preset("SigLIP-B", "vit_base_patch16_siglip_224", None, 16),
    Preset("EVA-02-T", "eva02_tiny_patch14_224", None, 21),
    Preset("hybrid R26 + ViT-S", "vit_small_r26_s32_224", None, 4),
    Preset("ViT-B, transformers", "ViTForImageClassification", None, 16),
    Preset("DeiT-B distilled, transformers", "DeiTForImageClassificationWithTeacher", None, 16),
    Preset("DINOv2-B, registers, transformers", "Dinov2WithRegistersModel", None, 21),
    Preset("CLIP-B/32, transformers", "CLIPVisionModel", None, 4),
    Preset("SigLIP-B, transformers", "SiglipVisionModel", None, 16),
)
"""One of each other kind; those of transformers by the class that has their configuration as its default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This verb has no options of its own."""


def run(args: argparse.Namespace) -> int:
    """List."""
    from dtem import adapters

    has_transformers = importlib.util.find_spec("transformers") is not None
    families = [{"name": name, "supported": _supported(name, has_transformers)} for name in adapters.ADAPTERS]
    listed_others = [preset for preset in OTHERS if has_transformers or preset.name.islower()]
    with progress(len(PRESETS) + len(listed_others), "counting") as advance:
        models, others = ([_counted(preset, advance) for preset in part] for part in (PRESETS, listed_others))
    document = {"families": families, "models": models, "others": others, "conventions": common.CONVENTIONS}
    listed = common.table("Supported", ("family", "models"), [(f["name"], f["supported"]) for f in families])
    listed.columns[1].justify = "left"
    common.show(args, document, listed, _table("The paper's models", models), _table("One of each other kind", others))
    return 0


def _supported(family: str, has_transformers: bool) -> str:
    from dtem import adapters

    if adapters.ORIGINS[family] == "transformers" and not has_transformers:
        return 'needs transformers: pip install "dtem[transformers]"'
    return adapters.load(family).supported


def _counted(preset: Preset, done: Callable[[], None]) -> dict[str, Any]:
    described = _describe(preset)
    done()
    return described


@functools.cache
def _describe(preset: Preset) -> dict[str, Any]:
    import torch

    import dtem

    with torch.device("meta"):
        if preset.name.islower():
            options = {} if preset.pool is None else {"global_pool": preset.pool}
            handle = dtem.patch(common.create(preset.name, **options))
        else:
            import transformers

            cls = getattr(transformers, preset.name)
            handle = dtem.patch(cls(cls.config_class()).eval())
    whole = common.count(handle)
    handle.r = preset.r
    merged = common.count(handle)
    return {
        "title": preset.title,
        "name": preset.name,
        "pool": preset.pool,
        "image": list(handle.host.image),
        "tokens": handle.host.patches + handle.host.prefix,
        "prefix": handle.host.prefix,
        "pooling": handle.host.pooling,
        "depth": handle.host.depth,
        "r": preset.r,
        "tokens_left": handle.tokens[-1],
        "macs": whole.macs,
        "paper": whole.paper,
        "merged_macs": merged.macs,
        "merged_paper": merged.paper,
    }


def _table(title: str, models: list[dict[str, Any]]) -> object:
    return common.table(
        title,
        ("model", "name", "--pool", "pooling", "tokens", "prefix", "r", "left", "GFLOPs (MACs)", "GFLOPs (paper)"),
        [
            (
                model["title"],
                model["name"],
                model["pool"] or "–",
                model["pooling"],
                str(model["tokens"]),
                str(model["prefix"]),
                str(model["r"]),
                str(model["tokens_left"]),
                f"{common.giga(model['macs'])} → {common.giga(model['merged_macs'])}",
                f"{common.giga(model['paper'])} → {common.giga(model['merged_paper'])}",
            )
            for model in models
        ],
    )
