"""Segmenter (`dtem.hosts.segmenter`): merging before every component of the encoder, undone after it.

The decoder reads every patch, so nothing stays merged: what is saved is the work inside attention and MLP.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dtem import ops
from dtem.adapters import lean
from dtem.adapters.base import Adapter, Merger, Trace, checkpointed, current_trace, finish
from dtem.adapters.lean import Lean
from dtem.adapters.timm_block import attention_alone, mlp_alone, usable
from dtem.adapters.timm_vit import TimmVit
from dtem.hosts.segmenter import Segmenter
from dtem.methods.dense import DenseMethod, Grouped
from dtem.types import HostSpec, Tokens


class SegmenterAdapter(Adapter):
    """Adapter of our own Segmenter, with an encoder that the adapter of timm takes."""

    family: ClassVar[str] = "segmenter"
    provides: ClassVar[frozenset[str]] = frozenset({"input"})
    supported: ClassVar[str] = "Segmenter models of dtem.hosts.segmenter (dense prediction: dtem and tome)"

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, Segmenter):
            return ""
        if type(model) is not Segmenter:
            return "it is a subclass of Segmenter with a forward of its own"
        reason = TimmVit().refusal(model.encoder)
        if reason is None:
            return None
        return f"its encoder is a {type(model.encoder).__name__}" + (f": {reason}" if reason else "")

    def describe(self, model: Segmenter) -> HostSpec:
        inner = TimmVit().describe(model.encoder)
        name = model.pretrained_cfg["architecture"]
        return dataclasses.replace(inner, name=name, family=self.family, pooling="dense")

    def key_projections(self, model: Segmenter) -> list[tuple[Tensor, Tensor | None]]:
        return TimmVit().key_projections(model.encoder)

    def attach(self, model: Segmenter, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = MergingSegmenter

    def detach(self, model: Segmenter) -> None:
        model.__class__ = Segmenter
        del model.dtem


class MergingSegmenter(Segmenter):
    """Segmenter, merging."""

    dtem: Merger

    def encode(self, images: Tensor) -> Tensor:
        trace = current_trace()
        if not self.dtem.active and trace is None:
            return super().encode(images)
        method, encoder = self.dtem.method, self.encoder
        x = self.embed(images)
        memory = lean.begin(x)
        again = encoder.grad_checkpointing and torch.is_grad_enabled()
        plan = self.dtem.plan(x.shape[1] - encoder.num_prefix_tokens)
        offers: list[ops.Offer] = []
        for layer, (block, r) in enumerate(zip(encoder.blocks, plan, strict=True)):
            step = functools.partial(run_block, method, layer, block, usable(block, memory), r, trace, offers)
            x = checkpointed(step, x) if again else step(x)
        finish(method, Tokens(x, carry={"offers": tuple(offers)}))
        return encoder.norm(x)


def run_block(
    method: DenseMethod,
    layer: int,
    block: Block,
    space: Lean | None,
    r: int,
    trace: Trace | None,
    offers: list[ops.Offer],
    x: Tensor,
) -> Tensor:
    """One block: the steps of `methods.dense`, for attention and for the MLP. What is to be priced goes to `offers`."""

    def attention(grouped: Grouped) -> Tensor:
        return attention_alone(block, space, grouped.x, method.weigh(grouped))

    def mlp(grouped: Grouped) -> Tensor:
        return mlp_alone(block, space, grouped.x)

    halves: tuple[tuple[nn.Module, Callable[[Grouped], Tensor]], ...] = ((block.norm1, attention), (block.norm2, mlp))
    for half, (norm, component) in enumerate(halves):
        grouped = method.group(2 * layer + half, norm(x), r)
        if trace is not None:
            trace.record(_recorded(method, grouped))
        if grouped.offer is not None:
            offers.append(grouped.offer)
        y = method.ungroup(component(grouped), grouped)
        x = x + y if space is None else y.add_(x)
    return x


def _recorded(method: DenseMethod, grouped: Grouped) -> Tokens:
    """What a trace keeps of one component: two records for each block."""
    x, size, matching, edges, _ = grouped
    source = None
    if matching is None:
        source = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    elif edges is None:
        source = matching.source
    return Tokens(x, size, None if source is None else source[:, method.host.prefix :])
