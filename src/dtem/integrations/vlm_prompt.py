"""Prompts of vision-language models whose images have fewer tokens than their processor put placeholders in.

The processor writes one placeholder for each token of the unmerged vision tower. Before the host's forward or
`generate` runs, the surplus placeholders are removed, with their columns in all that has one column per token: masks,
positions, labels. The host then sees a shorter prompt, and its positions, masks, caches, beams and losses follow.

The language model can count a merged token by its size: the log sizes are added to its attention logits by key, in the
forward that reads the image and in all later ones with the same cache (`attend_by_size`).
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_masks_for_generate

from dtem import ops
from dtem.errors import DtemError
from dtem.methods import Method

CACHE_ATTRIBUTE = "dtem_prompt"
"""Attribute of a key-value cache: the `CachedPrompt` of what it holds."""
IGNORED_LABEL = -100
BY_COLUMN = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids", "labels")
"""Arguments of the host's forward that have one entry for each token of the prompt."""


def decoder_bias(method: Method, size: Tensor | None) -> Tensor | None:
    """Attention bias of a text decoder by image token: log sizes, or none with ``proportional=True``, as in the paper.

    Without it, a partly merged token (soft mode) counts by its remaining size, so that training matches inference, and
    padding (size 0) does not count.
    """
    if size is None:
        return None
    if method.proportional_decoder:
        return ops.log_size(size)
    if method.soft or not method.conserves_size:
        return ops.log_size(size.clamp(max=1.0))
    return None


@dataclass(frozen=True)
class Shortening:
    """Which columns of a prompt are kept. Prompts of one batch may lose different numbers of columns: those that lose
    more are padded, at their end if they have padding there already, else at their start."""

    columns: Tensor
    """For each column of the shorter prompt its column in the prompt, (b, t')."""
    padding: Tensor
    """Where that is padding, (b, t')."""
    shifts: Tensor
    """For each column of the prompt the number of columns that were removed before it, (b, t)."""

    @property
    def width(self) -> int:
        """Columns of the prompt."""
        return self.shifts.shape[1]

    @property
    def lost(self) -> int:
        """How much shorter the prompt has become."""
        return self.shifts.shape[1] - self.columns.shape[1]

    def select(self, name: str, value: Tensor, image_token: int) -> Tensor:
        """An argument of `BY_COLUMN` for the shorter prompt."""
        if value.ndim == 3:
            return ops.take(value, self.columns)
        if name == "position_ids":
            value = value - self.shifts
        value = value.expand(self.columns.shape[0], -1).gather(1, self.columns)
        fill = {"input_ids": int(image_token == 0), "attention_mask": 0, "labels": IGNORED_LABEL}.get(name)
        padding = self.padding
        if name == "labels":  # nothing predicts the first token, so padding must not
            padding = padding | nn.functional.pad(padding, (1, -1))
        return value if fill is None else value.masked_fill(padding, fill)


def shorten(
    inputs: Mapping[str, Any], placeholders: Tensor, full: int, kept: int, images: int | None, image_token: int
) -> tuple[dict[str, Any], Shortening | None]:
    """The inputs of a prompt without surplus placeholders, and what was removed; None if there is nothing to remove.

    Args:
        inputs: arguments of the host's forward or `generate`.
        placeholders: where the prompt has placeholders, (b, t).
        full: placeholders that the processor writes for an image.
        kept: tokens of an image after merging.
        images: images in this call; a prompt that has `kept` placeholders for each is short already.
        image_token: id of the placeholder.
    """
    total = int(placeholders.sum())
    if kept == full or not total or (images is not None and total == images * kept):
        return dict(inputs), None
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != placeholders.shape:
        raise DtemError(
            f"attention_mask of shape {tuple(mask.shape)} for a prompt of shape {tuple(placeholders.shape)}: while "
            "tokens are merged it needs one entry for each token of the prompt, as the processor returns it. (To go on "
            "from a cache, pass the whole conversation to generate.)"
        )
    dropped = placeholders & ((placeholders.cumsum(dim=1) - 1) % full >= kept)
    losses = dropped.sum(dim=1)
    fewest, most = (int(count) for count in torch.stack([losses.min(), losses.max()]).tolist())
    if fewest != most and mask is None:
        raise DtemError("prompts with different numbers of images need attention_mask, as the processor returns it")
    at_end = torch.zeros_like(dropped[:, :1]) if mask is None else mask[:, -1:] == 0
    rank = torch.where(dropped, torch.where(at_end, 2, 0), 1)
    order = rank.sort(dim=1, stable=True).indices
    window = torch.arange(placeholders.shape[1] - fewest, device=order.device)
    columns = order.gather(1, window + torch.where(at_end, 0, fewest))
    shifts = dropped.cumsum(dim=1)
    shortening = Shortening(columns, dropped.gather(1, columns), shifts)
    present = {name: inputs[name] for name in BY_COLUMN if inputs.get(name) is not None}
    changed = {name: shortening.select(name, value, image_token) for name, value in present.items()}
    return {**inputs, **changed}, shortening


@dataclass(frozen=True)
class CachedPrompt:
    """What a key-value cache knows of the images in it."""

    per_image: int
    """Tokens of each image."""
    bias: Tensor | None = None
    """Added to the attention logits by key, for the first columns of the cache, (b, n)."""
    shortening: Shortening | None = None
    """If the caller of the host's forward goes on with masks of the longer prompt."""


def cached_prompt(cache: Any) -> CachedPrompt | None:
    """What a cache knows of the images in it; None if it is empty or has no images with merged tokens."""
    prompt: CachedPrompt | None = getattr(cache, CACHE_ATTRIBUTE, None)
    return prompt if prompt is not None and int(cache.get_seq_length()) else None


def check_cache(cache: Any, per_image: int) -> None:
    """Refuse a cache whose images have another number of tokens: its positions would not be those of this prompt."""
    prompt = cached_prompt(cache)
    if prompt is not None and prompt.per_image != per_image:
        raise DtemError(
            f"past_key_values was filled with {prompt.per_image} tokens per image, and now an image has "
            f"{per_image}: continue at the r that filled it, or start with an empty cache"
        )


@dataclass
class ReadingState:
    """One forward of a language model that reads image tokens."""

    images: Any = None
    """The output of the host's `get_image_features` for the images of this call, which the host need not compute."""
    rows: Tensor | None = None
    """Where this forward has placeholders, (b, q); None: it has no image."""
    bias: Tensor | None = None
    """Bias by image token, (images, n)."""
    cached: Tensor | None = None
    """Bias of the columns in the cache, (b, n)."""
    total: Tensor | None = None
    """Bias of all columns up to this forward's, once it has run; None: there is none."""

    def of_columns(self, batch: int, past: int, count: int) -> Tensor | None:
        """The bias by column of the cache and of this forward, (b, past + count)."""
        new = None if self.bias is None or self.rows is None else _by_row(self.rows, self.bias)
        if self.cached is None:
            return None if new is None else nn.functional.pad(new, (past, 0))
        old = _of_rows(self.cached, batch)[:, :past]
        old = nn.functional.pad(old, (0, past - old.shape[1]))
        return nn.functional.pad(old, (0, count)) if new is None else torch.cat([old, new], dim=1)


def _by_row(placeholders: Tensor, bias: Tensor) -> Tensor:
    """The bias of the images, (images, n), in the columns of their placeholders. `generate` repeats prompts for beams
    and samples after it has encoded the images."""
    rows, images = placeholders, bias.flatten()
    times = int(placeholders.sum()) // images.numel()
    row = torch.zeros(rows[::times].shape, dtype=bias.dtype, device=rows.device)
    return row.masked_scatter(rows[::times], images).repeat_interleave(times, dim=0)


def _of_rows(bias: Tensor, batch: int) -> Tensor:
    times, rest = divmod(batch, len(bias))
    if rest:
        raise DtemError(
            f"the cache holds {len(bias)} prompts and this forward has {batch}: the sizes of merged tokens do not fit "
            "them. Select rows before the first forward, or patch with proportional=True"
        )
    return bias.repeat_interleave(times, dim=0)


_reading: contextvars.ContextVar[ReadingState | None] = contextvars.ContextVar("dtem_vlm_reading", default=None)


@contextlib.contextmanager
def reading(state: ReadingState) -> Iterator[ReadingState]:
    """For a while, language models that have the hook `attend_by_size` add the bias of `state`."""
    token = _reading.set(state)
    try:
        yield state
    finally:
        _reading.reset(token)


def is_reading() -> bool:
    """Whether this is inside `reading`: in a forward that the host's `generate` calls."""
    return _reading.get() is not None


def encoded_images() -> Any:
    """The images that were encoded before the host asks for them; None: they were not."""
    state = _reading.get()
    return None if state is None else state.images


def attend_by_size(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
    """Forward pre-hook of a language model: adds the bias of image tokens to its attention mask."""
    state = _reading.get()
    if state is None or (state.bias is None and state.cached is None):
        return None
    embeds, cache = kwargs["inputs_embeds"], kwargs.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    bias = state.of_columns(embeds.shape[0], past, embeds.shape[1])
    if bias is None:
        return None
    state.total = bias
    used = module.config._attn_implementation
    if used not in ("sdpa", "eager"):
        raise DtemError(
            f"attn_implementation = {used!r} takes no attention bias, so the language model cannot count merged tokens "
            "by their size: choose 'sdpa', or patch with proportional=True (each counts once)"
        )
    masks = kwargs.get("attention_mask")
    if not isinstance(masks, dict) and (masks is None or masks.ndim == 2):
        masks = create_masks_for_generate(module.config, embeds, masks, cache, kwargs.get("position_ids"))
    if isinstance(masks, dict):
        mask: Any = {name: _biased(part, bias, module, kwargs) for name, part in masks.items()}
    else:
        mask = _biased(masks, bias, module, kwargs)
    return args, {**kwargs, "attention_mask": mask}


def _biased(mask: Any, bias: Tensor, module: Any, kwargs: dict[str, Any]) -> Tensor:
    """The additive mask (b, 1, q, k) with the bias by key."""
    embeds = kwargs["inputs_embeds"]
    if mask is None:  # plain causal attention, which the host leaves to the kernel
        mask = create_causal_mask(
            module.config,
            embeds,
            None,
            kwargs.get("past_key_values"),
            kwargs.get("position_ids"),
            allow_is_causal_skip=False,
        )
    if mask.dtype == torch.bool:
        lowest = torch.finfo(embeds.dtype).min
        mask = torch.zeros(mask.shape, dtype=embeds.dtype, device=mask.device).masked_fill(~mask, lowest)
    keys = mask.shape[-1]
    bias = bias[:, -keys:]  # of a sliding window, the last ones
    bias = nn.functional.pad(bias, (0, keys - bias.shape[1]))  # a static cache has columns to come
    total: Tensor = mask + bias[:, None, None, :].to(mask.dtype)
    return total


def follow_cache(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a forward after that of a prompt that was shortened, whose mask and positions are of the prompt."""
    prompt = cached_prompt(inputs.get("past_key_values"))
    if prompt is None or prompt.shortening is None:
        return inputs
    shortening, changed = prompt.shortening, {}
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and mask.ndim == 2:
        if len(mask) != len(shortening.columns) or mask.shape[1] < shortening.width:
            raise DtemError(
                f"attention_mask of shape {tuple(mask.shape)} does not continue from {len(shortening.columns)} prompts "
                f"of {shortening.width} tokens: give the mask of the prompts, with a column for each token after them"
            )
        first = shortening.select("attention_mask", mask[:, : shortening.width], 0)
        changed["attention_mask"] = torch.cat([first, mask[:, shortening.width :]], dim=1)
    if positions is not None:
        changed["position_ids"] = positions - shortening.shifts[:, -1:]
    return {**inputs, **changed}


def store(cache: Any, per_image: int | None, state: ReadingState, shortening: Shortening | None) -> None:
    """Note in a cache what later forwards need."""
    known = cached_prompt(cache)
    if per_image is None and known is None:
        return
    prompt = known if known is not None else CachedPrompt(per_image or 0)
    if state.total is not None:
        prompt = replace(prompt, bias=state.total.detach())
    if shortening is not None:
        prompt = replace(prompt, shortening=shortening)
    setattr(cache, CACHE_ATTRIBUTE, prompt)
