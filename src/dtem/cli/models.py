"""What is supported, and the paper's models with what merging at the paper's r saves.

Any other timm VisionTransformer made of plain blocks works as well: `dtem flops NAME` says so.
"""

import argparse
from typing import Any, NamedTuple

from dtem.cli import common

NAME = "models"
HELP = "list supported families and the paper's models"
EXAMPLES = """\
examples:
  dtem models
  dtem models --json
"""


class Preset(NamedTuple):
    """A model of the paper."""

    title: str
    name: str
    pool: str | None
    """None: it has one way of its own."""
    r: int
    """At which the paper trains it."""


PRESETS = (
    Preset("DeiT-T", "deit_tiny_patch16_224", "token", 16),
    Preset("DeiT-S", "deit_small_patch16_224", "token", 16),
    Preset("DeiT-B", "deit_base_patch16_224", "token", 16),
    Preset("AugReg ViT-S 384", "vit_small_patch16_384", "token", 48),
    Preset("LV-ViT-S", "lvvit_s", None, 14),
    Preset("MAE-B", "vit_base_patch16_224", "avg", 16),
    Preset("MAE-L", "vit_large_patch16_224", "avg", 8),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This verb has no options of its own."""


def run(args: argparse.Namespace) -> int:
    """List."""
    from dtem import adapters

    families = [{"name": name, "supported": adapters.load(name).supported} for name in adapters.ADAPTERS]
    models = [_describe(preset) for preset in PRESETS]
    document = {"families": families, "models": models, "conventions": common.CONVENTIONS}
    listed = common.table("Supported", ("family", "models"), [(f["name"], f["supported"]) for f in families])
    listed.columns[1].justify = "left"
    common.show(args, document, listed, _table(models))
    return 0


def _describe(preset: Preset) -> dict[str, Any]:
    import torch

    import dtem

    with torch.device("meta"):
        options = {} if preset.pool is None else {"global_pool": preset.pool}
        handle = dtem.patch(common.create(preset.name, **options))
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
        "depth": handle.host.depth,
        "r": preset.r,
        "tokens_left": handle.tokens[-1],
        "macs": whole.macs,
        "paper": whole.paper,
        "merged_macs": merged.macs,
        "merged_paper": merged.paper,
    }


def _table(models: list[dict[str, Any]]) -> object:
    return common.table(
        "The paper's models",
        ("model", "name", "--pool", "tokens", "prefix", "r", "left", "GFLOPs (MACs)", "GFLOPs (paper)"),
        [
            (
                model["title"],
                model["name"],
                model["pool"] or "–",
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
