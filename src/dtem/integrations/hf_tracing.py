"""Models of transformers as torch.export should see them: without the mask of ones that it would write into the graph.

transformers leaves out an attention mask that masks nothing, but not while a graph is exported, where it cannot look
into the mask. An attention of our own name, which transformers makes no masks for, is its SDPA without that mask.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from dtem.integrations.hf_base import encoder_of

UNMASKED = "dtem_unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)  # type: ignore[no-untyped-call, unused-ignore]


@contextlib.contextmanager
def without_masks(model: nn.Module) -> Iterator[None]:
    """Export a patched model's image encoder without attention masks; images have no padding."""
    encoder: Any = encoder_of(model)
    before = encoder.config._attn_implementation
    encoder.config._attn_implementation = UNMASKED
    naflex = isinstance(encoder.embeddings, Siglip2VisionEmbeddings)
    if naflex:
        encoder.embeddings.forward = _on_one_grid(encoder.embeddings, model)
    try:
        yield
    finally:
        encoder.config._attn_implementation = before
        if naflex:
            del encoder.embeddings.forward


def _on_one_grid(embeddings: Any, model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The embeddings of a NaFlex model for images of one shape; its own look at the grid of every image in turn."""
    _, height, width = model.dtem.method.host.image
    grid = torch.tensor([[height // embeddings.patch_size, width // embeddings.patch_size]])
    side = embeddings.position_embedding_size
    table = embeddings.position_embedding.weight.detach().reshape(side, side, -1)
    positions = embeddings.resize_positional_embeddings(table, grid, int(grid.prod()))

    def forward(pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
        patches: Tensor = embeddings.patch_embedding(pixel_values)
        return patches + positions

    return forward
