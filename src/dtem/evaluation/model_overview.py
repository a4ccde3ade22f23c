"""`model_overview`: the supported families, and what merging saves on the paper's models and one of each other kind."""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dtem import integrations
from dtem.errors import install
from dtem.evaluation.flops_report import CONVENTIONS, count_flops
from dtem.handle import patch
from dtem.models.factory import create_model
from dtem.progress import progress_bar
from dtem.tables import Report, Table, giga


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
    Preset("DINOv3-S", "vit_small_patch16_dinov3", None, 21),
    Preset("Perception Encoder B", "vit_pe_core_base_patch16_224", None, 16),
    Preset("hybrid R26 + ViT-S", "vit_small_r26_s32_224", None, 4),
    Preset("ViT-B, transformers", "ViTForImageClassification", None, 16),
    Preset("DeiT-B distilled, transformers", "DeiTForImageClassificationWithTeacher", None, 16),
    Preset("DINOv2-B, registers, transformers", "Dinov2WithRegistersModel", None, 21),
    Preset("DINOv3-S, transformers", "DINOv3ViTModel", None, 16),
    Preset("CLIP-B/32, transformers", "CLIPVisionModel", None, 4),
    Preset("SigLIP-B, transformers", "SiglipVisionModel", None, 16),
    Preset("SigLIP 2-B NaFlex, transformers", "Siglip2VisionModel", None, 21),
    Preset("AIMv2-L, transformers", "Aimv2VisionModel", None, 8),
)
"""One of each other kind; those of transformers by the class whose default configuration is that model."""


@dataclass(frozen=True)
class SupportedFamily:
    """A family of models."""

    name: str
    supported: str
    """Which models are supported, or what must be installed for them."""


@dataclass(frozen=True)
class ModelSummary:
    """A model: its tokens, and its operations without merging and at `r`."""

    title: str
    name: str
    pool: str | None
    """global_pool that the paper uses; None: the model's own."""
    r: int
    image: list[int]
    """Channels, height and width."""
    tokens: int
    prefix: int
    """Tokens that are no patches: class, distillation and register tokens."""
    pooling: str
    depth: int
    tokens_left: int
    """After the last block at `r`."""
    macs: int
    paper: int
    """Operations as the paper counts them."""
    merged_macs: int
    merged_paper: int


@dataclass(frozen=True, repr=False)
class ModelOverview(Report):
    """What `model_overview` returns."""

    families: list[SupportedFamily]
    models: list[ModelSummary]
    """The paper's."""
    others: list[ModelSummary]
    """One of each other kind."""

    def to_dict(self) -> dict[str, Any]:
        fields = {name: [vars(row) for row in getattr(self, name)] for name in ("families", "models", "others")}
        return {**fields, "conventions": CONVENTIONS}

    def parts(self) -> list[Table | str]:
        families = [(family.name, family.supported) for family in self.families]
        return [
            Table("Supported", ("family", "models"), families, left=2),
            _table("The paper's models", self.models),
            _table("One of each other kind", self.others),
        ]


def model_overview(*, progress: bool = True) -> ModelOverview:
    """List the supported families, and what merging saves on the paper's models and one of each other kind.

    Names of single models: `dtem.list_models`.

    Args:
        progress: show a progress bar on stderr while operations are counted.

    Examples:
        >>> overview = dtem.model_overview()
        >>> print(overview)
        >>> [model.name for model in overview.models]
    """
    has_transformers = importlib.util.find_spec("transformers") is not None
    families = []
    for name in integrations.INTEGRATIONS:
        usable = has_transformers or integrations.ORIGINS.get(name) != "transformers"
        supported = (integrations.load(name).supported or name) if usable else install("transformers")
        families.append(SupportedFamily(name, supported))
    presets = [*PRESETS, *(preset for preset in OTHERS if has_transformers or preset.name.islower())]
    summaries = []
    with progress_bar(len(presets), "counting", "model", show=progress) as advance:
        for preset in presets:
            summaries.append(_summary(preset))
            advance(1)
    return ModelOverview(families, summaries[: len(PRESETS)], summaries[len(PRESETS) :])


@functools.cache
def _summary(preset: Preset) -> ModelSummary:
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
    return ModelSummary(
        **preset._asdict(),
        image=report.image,
        tokens=report.tokens,
        prefix=handle.host.prefix,
        pooling=handle.host.pooling,
        depth=handle.host.depth,
        tokens_left=merged.tokens,
        macs=unmerged.macs,
        paper=unmerged.paper,
        merged_macs=merged.macs,
        merged_paper=merged.paper,
    )


def _table(title: str, models: list[ModelSummary]) -> Table:
    columns = (
        "model", "name", "--global-pool", "pooling", "tokens", "prefix", "r", "left", "GFLOPs (MACs)", "GFLOPs (paper)",
    )  # fmt: skip
    rows = [
        (
            model.title,
            model.name,
            model.pool or "–",
            model.pooling,
            *(str(count) for count in (model.tokens, model.prefix, model.r, model.tokens_left)),
            f"{giga(model.macs)} → {giga(model.merged_macs)}",
            f"{giga(model.paper)} → {giga(model.merged_paper)}",
        )
        for model in models
    ]
    return Table(title, columns, rows)
