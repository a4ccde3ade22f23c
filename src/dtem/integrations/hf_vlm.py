"""Vision-language models of transformers (PaliGemma, LLaVA): tokens are merged inside the vision tower, and the
language model reads the shorter sequence.

The host's own forward and `generate` run, on a prompt without the surplus placeholders (`vlm_prompt`). The images are
encoded before, so that their number of tokens is known. The tower stops at the layer whose features the host selects
(`vision_feature_layer`), and its tokens come in the order of their first patches, since the language model's positions
are those of the rows of an image.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    Cache,
    CLIPVisionModel,
    LlavaForConditionalGeneration,
    LlavaModel,
    PaliGemmaForConditionalGeneration,
    PaliGemmaModel,
    SiglipVisionModel,
)

from dtem import ops
from dtem.errors import DtemError
from dtem.integrations import vlm_prompt
from dtem.integrations.base import Merger, run_blocks
from dtem.integrations.hf_base import (
    HostLayout,
    Merging,
    Prepared,
    merges,
    merging_class,
    rebind,
    register_output_capture,
    with_sizes,
)
from dtem.integrations.hf_clip import ClipLayers
from dtem.integrations.hf_tower import VisionLanguage
from dtem.integrations.vlm_prompt import ReadingState, attend_by_size


class TowerLayers(ClipLayers):
    """The layers of a vision tower. Merged tokens are ordered by their first patches."""

    def run_merging(self, merger: Merger, prepared: Prepared, layers: list[Any], width: int) -> Tensor:
        checkpointing = layers[0].gradient_checkpointing
        tokens = run_blocks(merger, prepared.x, layers, prepared.split_block, checkpointing, track=True)
        merger.finish(tokens)
        y, size, source = tokens.x, tokens.size, tokens.source
        if source is not None and size is not None:
            order = by_first_patch(source, y.shape[1], merger.method.host.prefix)
            y, size = ops.take(y, order), size.gather(1, order)
        return with_sizes(y, size, None)


def by_first_patch(source: Tensor, tokens: int, prefix: int) -> Tensor:
    """The order of tokens in which prefix tokens come first, then the others by the first patch that each holds."""
    batch, patches = source.shape
    place = torch.arange(patches, device=source.device).expand(batch, -1)
    first = source.new_full((batch, tokens + 1), patches)
    first = first.scatter_reduce(1, source.where(source >= 0, tokens), place, "amin")
    first[:, :prefix] = -1
    return first[:, :tokens].sort(dim=1, stable=True).indices


def _encoded_once(host: Callable[..., Any]) -> Callable[..., Any]:
    """The host's `get_image_features`, which returns what `MergingVlm` has encoded already."""

    @functools.wraps(host)
    def get_image_features(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("vision_feature_select_strategy")
        layers = self.vision_tower.encoder.layers
        if merges(layers.merger) and given not in (None, getattr(self.config, "vision_feature_select_strategy", None)):
            raise DtemError(
                f"vision_feature_select_strategy = {given!r} is not that of the model's config; set it there before "
                "dtem.patch, or set handle.r = 0"
            )
        encoded = vlm_prompt.encoded_images()
        return host(self, *args, **kwargs) if encoded is None else encoded

    return get_image_features


class InnerPaliGemma(PaliGemmaModel):  # type: ignore[no-untyped-call]
    """The model without a head in a patched PaliGemmaForConditionalGeneration."""

    get_image_features = _encoded_once(PaliGemmaModel.get_image_features)


class InnerLlava(LlavaModel):  # type: ignore[no-untyped-call]
    """The model without a head in a patched LlavaForConditionalGeneration."""

    get_image_features = _encoded_once(LlavaModel.get_image_features)


INNER: dict[type[nn.Module], type[nn.Module]] = {
    PaliGemmaModel: InnerPaliGemma,
    LlavaModel: InnerLlava,
}
for _cls in INNER.values():
    register_output_capture(_cls)


def _on_shorter_prompts(host: Callable[..., Any]) -> Callable[..., Any]:
    """The host's forward (with its signature, which `generate` inspects), on prompts without surplus placeholders."""
    names = list(inspect.signature(host).parameters)[1:]

    @functools.wraps(host)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebind(self)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        generating = vlm_prompt.is_reading()
        with vlm_prompt.reading(ReadingState()) as state:
            shortening, per_image = None, None
            if not is_merging(self):
                vlm_prompt.check_cache(inputs.get("past_key_values"), full_count(self))
                per_image = full_count(self) if _has_images(inputs) else None
            elif (images := _encode(self, inputs, state)) is not None:
                per_image = _per_image(images)
                inputs, shortening = _shorten(self, inputs, images, state, is_short=generating)
            elif not generating:
                inputs = vlm_prompt.follow_cache(inputs)
            cached = vlm_prompt.cached_prompt(inputs.get("past_key_values"))
            state.cached = None if cached is None else cached.bias
            outputs = host(self, **inputs)
        parts = outputs if isinstance(outputs, tuple) else outputs.values()
        cache = next((part for part in parts if isinstance(part, Cache)), None)
        if cache is not None:
            vlm_prompt.store(cache, per_image, state, shortening)
        return outputs

    return forward


class MergingVlm(Merging):
    """Mixin of patched vision-language models."""

    @property
    def full_image_tokens(self) -> int:
        """Tokens of an image for the language model where nothing is merged."""
        return full_count(self)

    @torch.no_grad()
    def generate(self: Any, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """As the host's: the returned sequences start with the whole prompts."""
        host: Any = super()
        if inputs is not None:
            kwargs["input_ids"] = inputs
        if not is_merging(self):
            return host.generate(None, generation_config, **kwargs)
        with vlm_prompt.reading(ReadingState()) as state:
            images = _encode(self, kwargs, state)
            ids, shortening = kwargs.get("input_ids"), None
            if images is not None or vlm_prompt.cached_prompt(kwargs.get("past_key_values")) is not None:
                kwargs, shortening = _shorten(self, kwargs, images, state)
            if shortening is None:
                return host.generate(None, generation_config, **kwargs)
            kwargs, generation_config = _shorter_limits(self, kwargs, generation_config, shortening.lost)
            out = host.generate(None, generation_config, **kwargs)
        if ids is None:
            return out
        sequences = out if isinstance(out, Tensor) else out.sequences
        prompts = ids.repeat_interleave(len(sequences) // len(ids), dim=0)
        sequences = torch.cat([prompts, sequences[:, ids.shape[1] - shortening.lost :]], dim=1)
        if isinstance(out, Tensor):
            return sequences
        out.sequences = sequences
        return out


def is_merging(model: Any) -> bool:
    """Whether forwards of a patched model run with merging now."""
    return merges(model.dtem)


def full_count(model: Any) -> int:
    """Tokens of an image for the language model where nothing is merged: what the processor writes placeholders for."""
    host = model.dtem.method.host
    dropped = getattr(model.config, "vision_feature_select_strategy", "full") == "default"
    return int(host.patches + host.prefix - dropped)


def _per_image(images: Any) -> int:
    return len(images.pooler_output[0])


def _has_images(inputs: dict[str, Any]) -> bool:
    return inputs.get("pixel_values") is not None or bool((inputs.get("mm_encoder_outputs") or {}).get("image"))


def _encode(model: Any, inputs: dict[str, Any], state: ReadingState) -> Any:
    """The images of a call, through tower and projector; None if it has none. The host then gets them from `state`."""
    if not _has_images(inputs):
        return None
    if inputs.get("pixel_values") is None:
        return inputs["mm_encoder_outputs"]["image"]
    names = inspect.signature(model.model.get_image_features).parameters
    state.images = model.model.get_image_features(
        **{name: inputs[name] for name in names if inputs.get(name) is not None}, return_dict=True
    )
    return state.images


def _shorten(
    model: Any, inputs: dict[str, Any], images: Any, state: ReadingState, is_short: bool = False
) -> tuple[dict[str, Any], vlm_prompt.Shortening | None]:
    """The inputs without surplus placeholders, unless they are so already. `state` is told where the others are, and
    their attention bias."""
    cache = inputs.get("past_key_values")
    cached = vlm_prompt.cached_prompt(cache)
    kept = _per_image(images) if images is not None else cached.per_image  # type: ignore[union-attr]
    vlm_prompt.check_cache(cache, kept)
    token, count = model.config.image_token_id, None if images is None else len(images.pooler_output)
    placeholders = _placeholders(model, inputs, token)
    if placeholders is None:
        return inputs, None
    shortening = None
    if not is_short:
        inputs, shortening = vlm_prompt.shorten(inputs, placeholders, full_count(model), kept, count, token)
    if images is None:
        return inputs, shortening
    if shortening is not None:
        if cached is not None and cached.shortening is not None:
            raise DtemError(
                "these images follow others in past_key_values: to add images to a cache, call generate with the whole "
                "conversation, or the model on all of it without a cache"
            )
        placeholders = placeholders.gather(1, shortening.columns) & ~shortening.padding
    if not hasattr(images.last_hidden_state, "dtem_size"):
        raise DtemError("mm_encoder_outputs does not say what was merged: make it with model.get_image_features")
    size = images.last_hidden_state.dtem_size
    state.rows = placeholders
    state.bias = vlm_prompt.decoder_bias(model.dtem.method, None if size is None else size[:, -kept:])
    return inputs, shortening


def _placeholders(model: Any, inputs: dict[str, Any], token: int) -> Tensor | None:
    """Where the prompt has placeholders, (b, t), as the host finds them."""
    if inputs.get("input_ids") is not None:
        found: Tensor = inputs["input_ids"] == token
        return found
    embeds = inputs.get("inputs_embeds")
    if embeds is None:
        return None
    embedding = model.get_input_embeddings()(torch.full((), token, dtype=torch.long, device=embeds.device))
    return (embeds == embedding).all(dim=-1)


def _shorter_limits(model: Any, kwargs: dict[str, Any], config: Any, lost: int) -> tuple[dict[str, Any], Any]:
    """Limits on the length of prompt and answer together, less what the prompt has lost."""
    kwargs, config = dict(kwargs), copy.deepcopy(config)
    for name in ("max_length", "min_length"):
        if kwargs.get(name) is not None:
            kwargs[name] = max(kwargs[name] - lost, 0)
        elif config is not None and getattr(config, name, None) is not None:
            setattr(config, name, max(getattr(config, name) - lost, 0))
        elif (own := getattr(model.generation_config, name, None)) is not None:
            kwargs[name] = max(own - lost, 0)
    return kwargs, config


def _merging_class(host: Any, norm: str | None) -> Any:
    layout = HostLayout("encoder.layers", norm, encoder="model.vision_tower", pooling="none")
    return merging_class(__name__, host, layout, MergingVlm, forward=_on_shorter_prompts(host.forward))


MergingPaliGemmaForConditionalGeneration = _merging_class(PaliGemmaForConditionalGeneration, "post_layernorm")
MergingLlavaForConditionalGeneration = _merging_class(LlavaForConditionalGeneration, None)


class HfVlm(VisionLanguage):
    """Integration of vision-language models whose language model reads the tokens of the tower as they come."""

    family: ClassVar[str] = "hf_vlm"
    supported: ClassVar[str] = "transformers PaliGemma and LLaVA with CLIP or SigLIP towers"
    fixed_length: ClassVar[bool] = True
    layers = TowerLayers
    towers = (CLIPVisionModel, SiglipVisionModel)
    merged: ClassVar = {
        PaliGemmaForConditionalGeneration: MergingPaliGemmaForConditionalGeneration,
        LlavaForConditionalGeneration: MergingLlavaForConditionalGeneration,
    }

    def attach(self, model: Any, merger: Merger) -> None:
        super().attach(model, merger)
        model.model.__class__ = INNER[type(model.model)]
        model.model.language_model.register_forward_pre_hook(attend_by_size, with_kwargs=True)

    def detach(self, model: Any) -> None:
        language_model = model.model.language_model
        for key in [key for key, hook in language_model._forward_pre_hooks.items() if hook is attend_by_size]:
            del language_model._forward_pre_hooks[key]
            del language_model._forward_pre_hooks_with_kwargs[key]
        model.model.__class__ = type(model.model).__mro__[1]
        super().detach(model)
