"""transformers' GIT: tokens merge in its vision encoder, and its text decoder reads the shorter sequence.

GIT takes the number of image tokens from its config, for the loss and for masks over cached tokens, always as
`image_patch_tokens` of a decoder attention. Here that is the number which the vision encoder has handed on: in the
forward that encodes the image, and in all later ones on the same cache. Positions of words do not depend on it.

Sizes go with the tokens where they matter: see `_weights`.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, GitForCausalLM, GitModel, GitVisionModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.git.modeling_git import GitEncoder, GitSelfAttention

from dtem import ops
from dtem.adapters.base import Merger
from dtem.adapters.hf import Anatomy, HfAdapter, Merging, rebind, records
from dtem.adapters.hf_clip import ClipLayers
from dtem.methods import Method

KEPT = "dtem_handed"
"""Attribute of a cache: what was handed on when its image was encoded."""
TOWER = "image_encoder.vision_model"


@dataclasses.dataclass(frozen=True)
class Handed:
    """What the decoder gets of an image (of all frames, if there are several)."""

    count: int
    """Tokens."""
    bias: Tensor | None
    """Added to the logits of attention to them: (b, count)."""

    def repeat(self, times: int) -> "Handed":
        """For so many copies of each image, one after the other."""
        return Handed(self.count, None if self.bias is None else self.bias.repeat_interleave(times, dim=0))


class _Exchange:
    """What one forward knows of its image."""

    def __init__(self, kept: Handed | None) -> None:
        self.kept = kept
        """By the cache, from the forward that encoded the image."""
        self.frames: list[Handed] = []
        """By the vision encoder in this forward."""

    @property
    def handed(self) -> Handed | None:
        """None: nothing was merged, and what the host knows of itself is right."""
        if self.frames:
            biases = [frame.bias for frame in self.frames if frame.bias is not None]
            self.kept = Handed(sum(f.count for f in self.frames), torch.cat(biases, dim=1) if biases else None)
            self.frames = []
        return self.kept


_exchange: contextvars.ContextVar[_Exchange | None] = contextvars.ContextVar("dtem_exchange", default=None)


def _handed() -> Handed | None:
    exchange = _exchange.get()
    return None if exchange is None else exchange.handed


@contextlib.contextmanager
def _exchanging(cache: object) -> Iterator[_Exchange]:
    exchange = _Exchange(getattr(cache, KEPT, None))
    token = _exchange.set(exchange)
    try:
        yield exchange
    finally:
        _exchange.reset(token)


class GitVisionLayers(ClipLayers):
    """The layers of GIT's vision encoder, which say what they hand on."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(x, *args, **kwargs)
        exchange = _exchange.get()
        if exchange is not None:
            assert self.merger is not None
            exchange.frames.append(Handed(y.shape[1], _weights(self.merger.method, y.dtem_size)))
        return y


def _weights(method: Method, size: Tensor | None) -> Tensor | None:
    """The logarithm of how much the decoder's attention counts each token: by its size, or, with ``proportional=True``,
    once, as the paper's decoder does. Once: a token that has given most of itself away (in soft merging) counts as what
    is left of it, so that training sees what inference will. Padding (of size 0) does not count."""
    if size is None:
        return None
    if method.everywhere:
        return ops.log_size(size)
    if method.soft or not method.keeps_mass:
        return ops.log_size(size.clamp(max=1.0))
    return None


class MergingGitSelfAttention(GitSelfAttention):
    """An attention of the decoder that knows how many image tokens there are."""

    @property
    def image_patch_tokens(self) -> int:
        handed = _handed()
        return self.__dict__["image_patch_tokens"] if handed is None else handed.count


class MergingGitEncoder(GitEncoder):
    """GIT's decoder stack (which it calls encoder): attention to image tokens has their bias."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        handed = _handed()
        if handed is not None and handed.bias is not None:
            assert attention_mask is not None, "GIT makes a mask for every forward"
            attention_mask = _biased(attention_mask, handed.bias, hidden_states.shape[0])
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


def _biased(mask: Tensor, bias: Tensor, rows: int) -> Tensor:
    """The additive mask (b, 1, q, k) with `bias` on the image's columns. Images are repeated as the host does it."""
    bias = nn.functional.pad(bias.repeat(rows // bias.shape[0], 1), (0, mask.shape[-1] - bias.shape[1]))
    return mask + bias[:, None, None, :].to(mask.dtype)


def _exchanges(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The host's forward (with its signature, which `generate` reads), with an exchange around it."""

    @functools.wraps(forward)
    def exchanging(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _exchange.get() is not None:
            return forward(self, *args, **kwargs)
        if isinstance(self, Merging):
            rebind(self)
        with _exchanging(kwargs.get("past_key_values")) as exchange:
            outputs = forward(self, *args, **kwargs)
            parts = outputs if isinstance(outputs, tuple) else outputs.values()
            cache = next((part for part in parts if isinstance(part, Cache)), None)
            if cache is not None and exchange.handed is not None:
                setattr(cache, KEPT, exchange.handed)
            return outputs

    return exchanging


class Seen(NamedTuple):
    """What the vision encoder says of some images."""

    features: Tensor
    """(b, n, c)"""
    handed: Handed | None
    """What goes with them; None where nothing was merged."""


def look(model: GitForCausalLM, images: Tensor) -> Seen:
    """Encode images, for `remembering`."""
    with _exchanging(None) as exchange:
        features: Tensor = model.git.image_encoder(images).last_hidden_state
        return Seen(features, exchange.handed)


@contextlib.contextmanager
def remembering(model: GitForCausalLM, seen: Seen) -> Iterator[None]:
    """Let `model.generate(pixel_values=images)` take `seen`, what `look` said of the images, instead of encoding them.

    `generate` itself would encode every image once per beam. For one thread at a time; patched or not.
    """

    def remembered(pixel_values: Tensor, *args: Any, **kwargs: Any) -> BaseModelOutput:
        times = len(pixel_values) // len(seen.features)
        exchange = _exchange.get()
        if exchange is not None and seen.handed is not None:
            exchange.frames = [seen.handed.repeat(times)]
        return BaseModelOutput(last_hidden_state=seen.features.repeat_interleave(times, dim=0))

    encoder = model.git.image_encoder
    encoder.forward = remembered
    try:
        yield
    finally:
        del encoder.forward


class MergingGitForCausalLM(Merging, GitForCausalLM):
    """transformers' GitForCausalLM, merging in its vision encoder."""

    anatomy = Anatomy("encoder.layers", "post_layernorm", tower=f"git.{TOWER}", reads="none")
    forward = _exchanges(GitForCausalLM.forward)


class MergingGitModel(Merging, GitModel):
    """transformers' GitModel, merging in its vision encoder."""

    anatomy = Anatomy("encoder.layers", "post_layernorm", tower=TOWER, reads="none")
    forward = _exchanges(GitModel.forward)


class InnerGitModel(GitModel):
    """The GitModel of a captioner that merges, for those who call it directly."""

    forward = _exchanges(GitModel.forward)


class MergingGitVision(Merging, GitVisionModel):
    """transformers' GitVisionModel, merging."""

    anatomy = Anatomy("encoder.layers", "post_layernorm", tower="vision_model", reads="none")


records(InnerGitModel)

_INNER: dict[type[nn.Module], type[nn.Module]] = {
    GitModel: InnerGitModel,
    GitEncoder: MergingGitEncoder,
    GitSelfAttention: MergingGitSelfAttention,
}


class HfGit(HfAdapter):
    """Adapter of transformers' GIT: the captioner, its model without head, its vision encoder alone."""

    family: ClassVar[str] = "hf_git"
    supported: ClassVar[str] = "transformers GIT (GitForCausalLM, GitModel, GitVisionModel)"
    layers = GitVisionLayers
    merged: ClassVar = {
        GitForCausalLM: MergingGitForCausalLM,
        GitModel: MergingGitModel,
        GitVisionModel: MergingGitVision,
    }

    def key_attention(self, layer: Any) -> nn.Module:
        return layer.self_attn

    def prefix(self, tower: Any) -> tuple[int, bool]:
        return 1, True

    def attach(self, model: nn.Module, merger: Merger) -> None:
        super().attach(model, merger)
        for module in model.modules():
            module.__class__ = _INNER.get(type(module), type(module))

    def detach(self, model: nn.Module) -> None:
        for module in model.modules():
            if type(module) in _INNER.values():
                module.__class__ = type(module).__mro__[1]
        super().detach(model)
