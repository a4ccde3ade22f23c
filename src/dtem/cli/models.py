"""List supported models: with a pattern their names, without one the families and the paper's models.

Every other model of these families works as well: `dtem flops --model NAME` says so, for transformers
`dtem flops --model hf:NAME`.
"""

import argparse
import functools
import importlib.util
from typing import Any, NamedTuple

from dtem.cli.parser import VerbParser
from dtem.cli.printing import print_parts
from dtem.errors import install
from dtem.tables import Table, giga

HELP = "list supported models, families and the paper's models"
EXAMPLES = """\
examples:
  dtem models
  dtem models 'deit*'
  dtem models --json
"""


class Preset(NamedTuple):
    """A model of the overview."""

    title: str
    name: str
    pool: str | None
    """global_pool; None: the model's own."""
    r: int
    """At which the paper trains it; for others, one that merges about as large a share of their tokens."""


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
"""One of each other kind; those of transformers by the class whose default configuration is that model."""


def add_arguments(parser: VerbParser) -> None:
    """Options of this verb."""
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help="list names that match it, such as 'deit*'")


def run(args: argparse.Namespace) -> int:
    """List names, or print the overview."""
    from dtem import integrations
    from dtem.evaluation.flops_report import CONVENTIONS
    from dtem.models.factory import list_models
    from dtem.progress import progress_bar

    if args.pattern is not None:
        names = list_models(args.pattern)
        print_parts(args, {"models": names}, "\n".join(names) or f"no supported model matches {args.pattern}")
        return 0
    has_transformers = importlib.util.find_spec("transformers") is not None
    families = []
    for name in integrations.INTEGRATIONS:
        usable = has_transformers or integrations.ORIGINS.get(name) != "transformers"
        supported = (integrations.load(name).supported or name) if usable else install("transformers")
        families.append({"name": name, "supported": supported})
    presets = [*PRESETS, *(preset for preset in OTHERS if has_transformers or preset.name.islower())]
    rows = []
    with progress_bar(len(presets), "counting", "model") as advance:
        for preset in presets:
            rows.append(_describe(preset))
            advance(1)
    papers, others = rows[: len(PRESETS)], rows[len(PRESETS) :]
    document = {"families": families, "models": papers, "others": others, "conventions": CONVENTIONS}
    supported_table = Table("Supported", ("family", "models"), [tuple(family.values()) for family in families], left=2)
    tables = _table("The paper's models", papers), _table("One of each other kind", others)
    print_parts(args, document, supported_table, *tables)
    return 0


@functools.cache
def _describe(preset: Preset) -> dict[str, Any]:
    import torch

    from dtem.evaluation.flops_report import count_flops
    from dtem.handle import patch
    from dtem.models.factory import create_model

    with torch.device("meta"):
        if preset.name.islower():
            model = create_model(preset.name, pretrained=False, global_pool=preset.pool)
        else:
            import transformers

            cls = getattr(transformers, preset.name)
            model = cls(cls.config_class()).eval()
        handle = patch(model)
    report = count_flops(handle, [0, preset.r])
    unmerged, merged = report.rows
    return {
        **preset._asdict(),
        "image": report.image,
        "tokens": report.tokens,
        **{name: getattr(handle.host, name) for name in ("prefix", "pooling", "depth")},
        "tokens_left": merged.tokens,
        "macs": unmerged.macs,
        "paper": unmerged.paper,
        "merged_macs": merged.macs,
        "merged_paper": merged.paper,
    }


def _table(title: str, models: list[dict[str, Any]]) -> Table:
    columns = (
        "model", "name", "--global-pool", "pooling", "tokens", "prefix", "r", "left", "GFLOPs (MACs)", "GFLOPs (paper)",
    )  # fmt: skip
    keys = ("title", "name", "pool", "pooling", "tokens", "prefix", "r", "tokens_left")
    rows = [
        (
            *(str("–" if model[key] is None else model[key]) for key in keys),
            *(f"{giga(model[cost])} → {giga(model[f'merged_{cost}'])}" for cost in ("macs", "paper")),
        )
        for model in models
    ]
    return Table(title, columns, rows)
