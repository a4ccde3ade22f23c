"""Segmenter (`dtem.models.segmenter`): merging before attention and MLP of every encoder block, unmerging after each.

The decoder needs every patch, so the computation inside attention and MLP is what merging saves. Other methods (ALGM)
merge between attention and MLP, as for a classifier, and every patch gets a copy of its token after the last block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dtem import ops
from dtem.errors import DtemError
from dtem.integrations import cpu_workspace, fast_block
from dtem.integrations.base import Integration, Merger, checkpointed, run_blocks
from dtem.integrations.dense import Component, run_block
from dtem.integrations.timm_block import attention_branch, mlp_branch
from dtem.integrations.timm_vit import TimmVit, full_grid, split_blocks
from dtem.methods.affine import find_affine
from dtem.methods.dense import DenseMethod, Grouped
from dtem.models.segmenter import Segmenter
from dtem.types import HostSpec, Tokens


class SegmenterIntegration(Integration):
    """Integration of dtem's Segmenter, whose encoder is a VisionTransformer of timm."""

    family: ClassVar[str] = "segmenter"
    provides: ClassVar[frozenset[str]] = frozenset({"input", "grid"})
    supported: ClassVar[str] = "Segmenter models of dtem.models.segmenter (dense prediction: algm, dtem and tome)"

    def refusal(self, model: nn.Module) -> str | None:
        if not isinstance(model, Segmenter):
            return ""
        if type(model) is not Segmenter:
            return "it is a subclass of Segmenter with a forward of its own"
        reason = TimmVit().refusal(model.encoder)
        if reason is None:
            return None
        return f"its encoder is a {type(model.encoder).__name__}" + (f": {reason}" if reason else "")

    def describe(self, model: Any) -> HostSpec:
        encoder = TimmVit().describe(model.encoder)
        name = model.pretrained_cfg["architecture"]
        norms, biases = find_affine(model, ("encoder.blocks", "encoder.norm"))
        return dataclasses.replace(encoder, name=name, family=self.family, pooling="dense", norms=norms, biases=biases)

    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        return TimmVit().key_projections(model.encoder)

    def encoder(self, model: Any) -> nn.Module:
        return model.encoder

    def attach(self, model: Any, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = MergingSegmenter

    def detach(self, model: Any) -> None:
        model.__class__ = Segmenter
        del model.dtem


class MergingSegmenter(Segmenter):
    """Segmenter, merging."""

    dtem: Merger

    def encode(self, images: Tensor) -> Tensor:
        trace = self.dtem.trace
        if not self.dtem.active and trace is None:
            return super().encode(images)
        method, encoder = self.dtem.method, self.encoder
        self.dtem.check_blocks(encoder.blocks, "attn")
        if encoder.patch_embed.num_patches != method.host.patches:
            raise DtemError(
                "the encoder's image size was changed after patching, so that r is another share of its tokens: "
                "unpatch the Segmenter, call encoder.set_input_size, and patch it again"
            )
        x = self.embed(images)
        checkpointing = encoder.grad_checkpointing and torch.is_grad_enabled()
        if not isinstance(method, DenseMethod):
            steps = split_blocks(self.dtem, encoder.blocks, x)
            tokens = run_blocks(self.dtem, x, steps, lambda step: step, checkpointing, lambda tokens: None)
            return full_grid(tokens.replace(x=encoder.norm(tokens.x)), encoder.num_prefix_tokens)
        branches = split_branches(self.dtem, encoder.blocks, x)
        plan = self.dtem.plan(x.shape[1] - encoder.num_prefix_tokens)
        merge_candidates: list[ops.MergeCandidates] = []
        for layer, (block, r) in enumerate(zip(encoder.blocks, plan, strict=True)):
            own = branches[layer]
            components = split_block(method, block, own)
            step = functools.partial(
                run_block, method, layer, components, r, trace, merge_candidates, in_place=own.in_place
            )
            x = checkpointed(step, x) if checkpointing else step(x)
        self.dtem.finish(Tokens(x, carry={"merge_candidates": tuple(merge_candidates)}))
        return encoder.norm(x)


class Branches(NamedTuple):
    """The residual branches of a block, without x."""

    attention: Callable[[Tensor, Tensor | None], Tensor]
    mlp: Callable[[Tensor], Tensor]
    in_place: bool
    """Whether their results can be written to."""


def split_branches(merger: Merger, blocks: Any, x: Tensor) -> list[Branches]:
    """The branches of every block."""
    partial = functools.partial
    workspace = cpu_workspace.create(x)
    if workspace is None:
        return [Branches(partial(attention_branch, block), partial(mlp_branch, block), False) for block in blocks]
    return [
        Branches(partial(attention_branch, block), partial(mlp_branch, block), False)
        if fast is None
        else Branches(partial(fast.attention_branch, workspace), partial(fast.mlp_branch, workspace), True)
        for block, fast in zip(blocks, fast_block.read(merger, blocks), strict=True)
    ]


def split_block(method: DenseMethod, block: Any, branches: Branches) -> tuple[Component, Component]:
    """Attention and MLP of a block, each with its norm."""

    def attention(grouped: Grouped) -> Tensor:
        return branches.attention(grouped.x, method.bias_of(grouped))

    def mlp(grouped: Grouped) -> Tensor:
        return branches.mlp(grouped.x)

    return (block.norm1, attention), (block.norm2, mlp)
