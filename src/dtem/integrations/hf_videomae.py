"""VideoMAE of transformers: a patch is a tube of two frames, and tubes merge across space and time."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    VideoMAEForPreTraining,
    VideoMAEForVideoClassification,
    VideoMAEModel,
)
from transformers.modeling_outputs import ImageClassifierOutput

from dtem import ops
from dtem.integrations.base import Attention, Mlp, linear_weights
from dtem.integrations.hf_base import (
    HfIntegration,
    HostLayout,
    Merging,
    MergingLayers,
    encoder_of,
    merging_class,
    name_of,
    rebind,
    size_weighted_mean,
)
from dtem.methods.affine import find_affine
from dtem.types import HostSpec, Taps


class VideoMAELayers(MergingLayers):
    """Layers of VideoMAE, as ViT's but with `query`, `key` and `value`."""

    attention: ClassVar[str] = "attention"

    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        return partial(_attention, layer), partial(_mlp, layer)


def _attention(layer: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Taps]:
    attn, h = layer.attention.attention, layer.layernorm_before(x)
    shape = (*h.shape[:2], -1, attn.attention_head_size)
    q, k, v = (project(h).view(shape).transpose(1, 2) for project in (attn.query, attn.key, attn.value))
    y = ops.attend(q, k, v, bias, attn.scaling, attn.dropout_prob if attn.training else 0.0)
    return x + layer.attention.output(y.transpose(1, 2).flatten(2), x), Taps(h, q, k, v, attn.scaling)


def _mlp(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.output(layer.intermediate(layer.layernorm_after(x)), x)  # with its residual
    return y


class MeanOfTubes(Merging):
    """Mixin of the classifier, which averages tubes: here by token size."""

    def forward(
        self: Any, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """As the host's."""
        if not self.dtem.active:
            host: Any = super()
            return host.forward(pixel_values=pixel_values, labels=labels, **kwargs)
        rebind(self)
        tubes = encoder_of(self)(pixel_values, **kwargs).last_hidden_state
        logits = self.classifier(self.fc_norm(size_weighted_mean(tubes, 0)))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)


BARE = HostLayout("encoder.layer", None, pooling="none")
CLASSIFIER = HostLayout("encoder.layer", None, encoder="videomae", pooling="mean")

MergingVideoMAEModel = merging_class(__name__, VideoMAEModel, BARE)
MergingVideoMAEForVideoClassification = merging_class(__name__, VideoMAEForVideoClassification, CLASSIFIER, MeanOfTubes)


class HfVideoMAE(HfIntegration):
    """Integration of transformers' VideoMAE."""

    family: ClassVar[str] = "hf_videomae"
    supported: ClassVar[str] = "transformers VideoMAE (VideoMAEModel, VideoMAEForVideoClassification)"
    layers = VideoMAELayers
    merged: ClassVar = {
        VideoMAEModel: MergingVideoMAEModel,
        VideoMAEForVideoClassification: MergingVideoMAEForVideoClassification,
    }
    refused: ClassVar = {
        VideoMAEForPreTraining: "it needs every tube in its place, and merged ones have none; use the model under it"
    }

    def refusal(self, model: Any) -> str | None:
        reason = super().refusal(model)
        if reason is not None:
            return reason
        if type(model) is VideoMAEForVideoClassification and not model.config.use_mean_pooling:
            return "use_mean_pooling = False: its classifier reads the first tube, which may be merged into others"
        return None

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        return 0, False

    def describe(self, model: Any) -> HostSpec:
        layout = self.merged[type(model)].layout
        encoder = model.get_submodule(layout.encoder)
        config, tubes = encoder.config, encoder.embeddings.patch_embeddings
        norms, biases = find_affine(model, self.affine_roots(model, layout))
        return HostSpec(
            name=name_of(model),
            family=self.family,
            depth=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=encoder.encoder.layer[0].attention.attention.attention_head_size,
            prefix=0,
            patches=tubes.num_patches,
            pooling=layout.pooling,
            image=(config.num_frames, config.num_channels, *tubes.image_size),
            masked=True,
            class_token=False,
            norms=norms,
            biases=biases,
        )

    @torch.no_grad()
    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        layout = getattr(model, "layout", None) or self.merged[type(model)].layout
        out: list[tuple[Tensor, Tensor | None]] = []
        for layer in model.get_submodule(layout.encoder).encoder.layer._modules.values():
            attn = layer.attention.attention
            weight, _ = linear_weights(attn.key)
            out.append((weight.unflatten(0, (-1, attn.attention_head_size)).mean(dim=0), None))
        return out
