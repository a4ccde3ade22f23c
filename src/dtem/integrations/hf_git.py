"""transformers' GIT: tokens are merged in its vision encoder, and its text decoder reads the shorter sequence.

GIT takes the number of image tokens from its config, for the loss and for masks over cached tokens, always as
`image_patch_tokens` of a decoder attention. Here it is the number of tokens from the vision encoder: in the forward
that encodes the image, and in all later ones with the same cache. Positions of words do not depend on it.

The decoder's attention to an image token can be proportional to its size: see `decoder_bias`.
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

from dtem.integrations.base import Merger
from dtem.integrations.hf_base import HfIntegration, HostLayout, Merging, rebind, register_output_capture
from dtem.integrations.hf_clip import ClipLayers
from dtem.integrations.vlm_prompt import decoder_bias

CACHE_ATTRIBUTE = "dtem_image_tokens"
"""Attribute of a key-value cache: the `ImageTokens` of its images."""
ENCODER = "image_encoder.vision_model"


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """Number and attention bias of the image tokens in the decoder (of all frames, if there are several)."""

    count: int
    bias: Tensor | None
    """Added to the attention logits by image token: (b, count)."""

    def repeat(self, times: int) -> "ImageTokens":
        """For `times` copies of each image, one after the other."""
        return ImageTokens(self.count, None if self.bias is None else self.bias.repeat_interleave(times, dim=0))


class _ForwardState:
    """The image tokens of one forward."""

    def __init__(self, cached: ImageTokens | None) -> None:
        self._image_tokens = cached
        self.frames: list[ImageTokens] = []
        """Image tokens that the vision encoder computed in this forward, by frame."""

    @property
    def image_tokens(self) -> ImageTokens | None:
        """From this forward, else from the cache. None: nothing was merged, and the host's own number is right."""
        if self.frames:
            biases = [frame.bias for frame in self.frames if frame.bias is not None]
            count = sum(frame.count for frame in self.frames)
            self._image_tokens = ImageTokens(count, torch.cat(biases, dim=1) if biases else None)
            self.frames = []
        return self._image_tokens


_state: contextvars.ContextVar[_ForwardState | None] = contextvars.ContextVar("dtem_git_forward", default=None)


def _image_tokens() -> ImageTokens | None:
    state = _state.get()
    return None if state is None else state.image_tokens


@contextlib.contextmanager
def _forward_state(cache: object) -> Iterator[_ForwardState]:
    state = _ForwardState(getattr(cache, CACHE_ATTRIBUTE, None))
    token = _state.set(state)
    try:
        yield state
    finally:
        _state.reset(token)


class GitVisionLayers(ClipLayers):
    """The layers of GIT's vision encoder, which report their image tokens to the decoder."""

    def run_layers(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Any = super().run_layers(x, *args, **kwargs)
        state = _state.get()
        if state is not None:
            assert self.merger is not None
            state.frames.append(ImageTokens(y.shape[1], decoder_bias(self.merger.method, y.dtem_size)))
        return y


class MergingGitSelfAttention(GitSelfAttention):
    """Self-attention of the decoder with the actual number of image tokens."""

    @property
    def image_patch_tokens(self) -> int:  # type: ignore[override]  # an attribute of the host, which others only read
        image_tokens = _image_tokens()
        return self.__dict__["image_patch_tokens"] if image_tokens is None else image_tokens.count


class MergingGitEncoder(GitEncoder):
    """GIT's decoder layers (which it calls encoder), with the attention bias of image tokens."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        image_tokens = _image_tokens()
        if image_tokens is not None and image_tokens.bias is not None:
            assert attention_mask is not None, "GIT makes a mask for every forward"
            attention_mask = _add_bias(attention_mask, image_tokens.bias, hidden_states.shape[0])
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


def _add_bias(mask: Tensor, bias: Tensor, rows: int) -> Tensor:
    """The additive mask (b, 1, q, k) with `bias` on the columns of the image. Images are repeated as in the host."""
    bias = nn.functional.pad(bias.repeat(rows // bias.shape[0], 1), (0, mask.shape[-1] - bias.shape[1]))
    return mask + bias[:, None, None, :].to(mask.dtype)


def _with_forward_state(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The host's forward (with its signature, which `generate` inspects), with a `_ForwardState` for its image."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _state.get() is not None:
            return forward(self, *args, **kwargs)
        if isinstance(self, Merging):
            rebind(self)
        with _forward_state(kwargs.get("past_key_values")) as state:
            outputs = forward(self, *args, **kwargs)
            parts = outputs if isinstance(outputs, tuple) else outputs.values()
            cache = next((part for part in parts if isinstance(part, Cache)), None)
            if cache is not None and state.image_tokens is not None:
                setattr(cache, CACHE_ATTRIBUTE, state.image_tokens)
            return outputs

    return wrapped


class EncodedImages(NamedTuple):
    """Output of the vision encoder."""

    features: Tensor
    """(b, n, c)"""
    image_tokens: ImageTokens | None
    """None if nothing was merged."""


def encode_image(model: GitForCausalLM, images: Tensor) -> EncodedImages:
    """Encode images, for `cached_image_tokens`."""
    with _forward_state(None) as state:
        encoder: Any = model.git.image_encoder
        return EncodedImages(encoder(images).last_hidden_state, state.image_tokens)


@contextlib.contextmanager
def cached_image_tokens(model: GitForCausalLM, encoded: EncodedImages) -> Iterator[None]:
    """Let `model.generate(pixel_values=images)` use `encoded`, the output of `encode_image`, instead of encoding again.

    `generate` itself encodes every image once per beam. For one thread at a time; the model may be patched or not.
    """

    def cached_forward(pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        times = len(pixel_values) // len(encoded.features)
        state = _state.get()
        if state is not None and encoded.image_tokens is not None:
            state.frames = [encoded.image_tokens.repeat(times)]
        features: Any = encoded.features.repeat_interleave(times, dim=0)
        return BaseModelOutput(last_hidden_state=features)

    encoder: Any = model.git.image_encoder
    encoder.forward = cached_forward
    try:
        yield
    finally:
        del encoder.forward


class MergingGitForCausalLM(Merging, GitForCausalLM):
    """transformers' GitForCausalLM, merging in its vision encoder."""

    layout = HostLayout("encoder.layers", "post_layernorm", encoder=f"git.{ENCODER}", pooling="none")
    forward = _with_forward_state(GitForCausalLM.forward)


class MergingGitModel(Merging, GitModel):
    """transformers' GitModel, merging in its vision encoder."""

    layout = HostLayout("encoder.layers", "post_layernorm", encoder=ENCODER, pooling="none")
    forward = _with_forward_state(GitModel.forward)


class InnerGitModel(GitModel):  # type: ignore[no-untyped-call]  # __init_subclass__ of transformers
    """The GitModel inside a patched GitForCausalLM, which may be called directly."""

    forward = _with_forward_state(GitModel.forward)


class MergingGitVision(Merging, GitVisionModel):
    """transformers' GitVisionModel, merging."""

    layout = HostLayout("encoder.layers", "post_layernorm", encoder="vision_model", pooling="none")


register_output_capture(InnerGitModel)

_INNER: dict[type[nn.Module], type[nn.Module]] = {
    GitModel: InnerGitModel,
    GitEncoder: MergingGitEncoder,
    GitSelfAttention: MergingGitSelfAttention,
}


class HfGit(HfIntegration):
    """Integration of transformers' GIT: the captioner, its model without a head, its vision encoder alone."""

    family: ClassVar[str] = "hf_git"
    supported: ClassVar[str] = "transformers GIT (GitForCausalLM, GitModel, GitVisionModel)"
    layers = GitVisionLayers
    merged: ClassVar = {
        GitForCausalLM: MergingGitForCausalLM,
        GitModel: MergingGitModel,
        GitVisionModel: MergingGitVision,
    }

    def prefix(self, encoder: Any) -> tuple[int, bool]:
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
