"""SigLIP 2 with images of any shape (NaFlex) in transformers. Padding neither merges nor receives.

SigLIP 2 of a fixed resolution has the classes of SigLIP (`hf_clip`). NaFlex pads the patches of every image to one
number and masks the padding. Here padding has size 0 and stays at the end, so that an image merges as it would without
any; a block removes r tokens of every image, or padding where an image has fewer than 2r patches left.
"""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import Siglip2ForImageClassification, Siglip2Model, Siglip2VisionModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2MultiheadAttentionPoolingHead

from dtem.errors import DtemError
from dtem.integrations.base import Merger
from dtem.integrations.hf_base import HostLayout, MeanPooled, MergingAttentionPool, Prepared, merging_class
from dtem.integrations.hf_clip import ClipLayers, HfSiglip


class Siglip2Layers(ClipLayers):
    """Layers of SigLIP 2, with padding."""

    def prepare(self, x: Tensor, attention_mask: Tensor | None, inputs: dict[str, Any]) -> Prepared:
        assert self.merger is not None
        if attention_mask is None:
            return Prepared(x, self.split_block)
        if self.merger.method.soft:
            raise DtemError(
                "soft merging does not support padding: train on images of one shape (pixel_attention_mask = None), as "
                "dtem train does"
            )
        return Prepared(x, self.split_block, real_tokens(attention_mask))


def real_tokens(mask: Tensor) -> Tensor:
    """Which tokens are no padding, (b, n), from a mask of transformers: (b, n) or (b, 1, q, n), boolean or added."""
    row = mask if mask.ndim == 2 else mask[:, 0, 0]
    return row == 0 if row.is_floating_point() else row.bool()


class MergingSiglip2Head(Siglip2MultiheadAttentionPoolingHead):
    """Pooling of a patched model: the sizes of tokens say which are padding."""

    merger: Merger
    """A plain attribute, as in `MergingLayers`."""

    def forward(self, hidden_state: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(hidden_state, None if self.merger.active else attention_mask)


TOWER = HostLayout(
    "encoder.layers",
    "post_layernorm",
    pooling="attention",
    replaced=(("head", MergingSiglip2Head), ("head.attention", MergingAttentionPool)),
)
INNER = replace(TOWER, encoder="vision_model")
MergingSiglip2VisionModel = merging_class(__name__, Siglip2VisionModel, TOWER)
MergingSiglip2Model = merging_class(__name__, Siglip2Model, INNER)
MergingSiglip2ForImageClassification = merging_class(
    __name__, Siglip2ForImageClassification, replace(INNER, pooling="mean"), MeanPooled
)


class HfSiglip2(HfSiglip):
    """Integration of transformers' SigLIP 2 (NaFlex)."""

    family: ClassVar[str] = "hf_siglip2"
    supported: ClassVar[str] = (
        "transformers SigLIP 2 NaFlex (Siglip2VisionModel, Siglip2Model, Siglip2ForImageClassification), with dtem and "
        "tome"
    )
    methods: ClassVar[frozenset[str] | None] = frozenset({"dtem", "tome"})
    methods_reason: ClassVar[str] = "whose padding only these leave alone"
    layers = Siglip2Layers
    merged: ClassVar = {
        Siglip2VisionModel: MergingSiglip2VisionModel,
        Siglip2Model: MergingSiglip2Model,
        Siglip2ForImageClassification: MergingSiglip2ForImageClassification,
    }
