"""Tasks that models are trained and evaluated for: datasets, losses and metrics of each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_FAMILIES = {"segmenter": "segmentation", "hf_git": "captioning", "hf_vlm": "answering", "hf_vlm_dense": "answering"}


def task_of(model: "nn.Module") -> str:
    """The task of a model, patched or not, by its host family."""
    from dtem import integrations

    merger = getattr(model, "dtem", None)
    family = merger.family if isinstance(merger, integrations.Merger) else integrations.find(model).family
    return _FAMILIES.get(family, "classification")
