"""Models of transformers as torch.export should see them: without the mask of ones that it would write into the graph.

transformers leaves out an attention mask that masks nothing, but not while a graph is exported, where it cannot look
into the mask. An attention of our own name, which transformers makes no masks for, is its SDPA without that mask.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dtem.integrations.hf_base import encoder_of

UNMASKED = "dtem_unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)  # type: ignore[no-untyped-call, unused-ignore]


@contextlib.contextmanager
def without_masks(model: nn.Module) -> Iterator[None]:
    """Export a patched model's image encoder without attention masks; images have no padding."""
    config: Any = encoder_of(model).config
    before = config._attn_implementation
    config._attn_implementation = UNMASKED
    try:
        yield
    finally:
        config._attn_implementation = before
