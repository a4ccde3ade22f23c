"""Shared code of the transformers integrations.

The host's own forward runs, with one change: its list of layers. While there is something to merge, the list iterates
over itself as the only layer, and its forward runs all layers with merging. Embeddings, masks, poolers and heads stay
the host's. Hidden states carry their token sizes (`dtem_size`) to modules that average or attend over them.
"""

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import generic, output_capturing
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, _active_collector

from dtem import integrations, ops
from dtem.errors import DtemError
from dtem.integrations import affine
from dtem.integrations.base import Attention, Integration, Merger, Mlp, linear_weights, run_blocks
from dtem.methods.affine import find_affine
from dtem.types import HostSpec, Taps

can_return_tuple: Callable[[Callable[..., Any]], Callable[..., Any]] = generic.can_return_tuple


def head_outputs(attn: Any, h: Tensor, bias: Tensor | None, scale: float, dropout: float) -> tuple[Tensor, Taps]:
    """Concatenated head outputs, (b, n, c), of an attention with q_proj, k_proj and v_proj."""
    shape = (*h.shape[:2], -1, attn.head_dim)
    q, k, v = (project(h).view(shape).transpose(1, 2) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    y = ops.attend(q, k, v, bias, scale, dropout if attn.training else 0.0)
    return y.transpose(1, 2).flatten(2), Taps(h, q, k, v, scale)


@torch.no_grad()
def head_mean_keys(attn: Any) -> tuple[Tensor, Tensor | None]:
    """The head-mean of the key projection."""
    weight, bias = linear_weights(attn.k_proj)
    split = (-1, attn.head_dim)
    return weight.unflatten(0, split).mean(dim=0), None if bias is None else bias.unflatten(0, split).mean(dim=0)


class Prepared(NamedTuple):
    """The tokens that enter the layers, how a layer is split, and which tokens are no padding (None: all)."""

    x: Tensor
    split_block: Callable[[Any], tuple[Attention, Mlp]]
    real: Tensor | None = None


def merges(merger: Merger | None) -> bool:
    """Whether the layers are run one by one now: something merges, or is traced."""
    return merger is not None and (merger.active or merger.trace is not None)


class MergingLayers(nn.ModuleList):
    """The list of layers of a patched model. Subclasses split a layer into attention and MLP."""

    merger: Merger | None = None
    """A plain attribute: the submodule is the model's `dtem`."""
    attention: ClassVar[str] = "self_attn"
    """Name of a layer's attention, which has k_proj and head_dim."""
    stop: int | None = None
    """While tokens are merged, only so many layers are run; None: all."""

    @abstractmethod
    def split_block(self, layer: Any) -> tuple[Attention, Mlp]:
        """Attention and MLP of a layer, each with its residual added."""

    def __iter__(self) -> Iterator[nn.Module]:
        # Not the list itself: accelerate replaces the `forward` of modules that it dispatches.
        return iter((self.run_layers,)) if merges(self.merger) else super().__iter__()  # type: ignore[arg-type]

    def run_layers(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run all layers."""
        assert self.merger is not None
        width = x.shape[-1]
        prepared = self.prepare(x, attention_mask, kwargs)
        layers: list[Any] = list(self._modules.values())[: self.stop]
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) or _is_recorded(name.removeprefix("output_"), layers[0]):
                raise DtemError(f"{name} needs every token in its place, but tokens are merged; set handle.r = 0")
        self.merger.check_blocks(layers, self.attention)
        return self.run_merging(self.merger, prepared, layers, width)

    def run_merging(self, merger: Merger, prepared: "Prepared", layers: list[Any], width: int) -> Tensor:
        """Run `layers` with merging. The result has the first `width` channels, and carries its token sizes."""
        checkpointing = layers[0].gradient_checkpointing
        tokens = run_blocks(merger, prepared.x, layers, prepared.split_block, checkpointing, real=prepared.real)
        merger.finish(tokens)
        features = tokens.x if tokens.x.shape[-1] == width else tokens.x[..., :width]
        return with_sizes(features, tokens.size, merger.method.bias(tokens))

    def prepare(self, x: Tensor, attention_mask: Tensor | None, inputs: dict[str, Any]) -> "Prepared":
        """What `run_blocks` runs on, from what the host passes to each of its layers."""
        if attention_mask is not None:
            raise DtemError("attention_mask cannot be used while tokens are merged; set handle.r = 0")
        return Prepared(x, self.split_block)

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # that of ModuleList iterates over the list


def _is_recorded(output: str, layer: nn.Module) -> bool:
    """Whether transformers records this output of the layers (or inside them) in this forward, by keyword or config."""
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    recorded = output in (_active_collector.get() or ())  # type: ignore[no-untyped-call]
    return recorded and any(
        getattr(hook, "__module__", None) == output_capturing.__name__
        for module in layer.modules()
        for hook in module._forward_hooks.values()
    )


def with_sizes(x: Any, size: Tensor | None, bias: Tensor | None) -> Tensor:
    """Hidden states that carry their token sizes to modules which average or attend over them."""
    x.dtem_size, x.dtem_bias = size, bias
    return x


def carried(x: Any, name: str) -> Tensor | None:
    """What `with_sizes` added. It is lost if a hook replaces the hidden states; pooling without it would be wrong."""
    if not hasattr(x, name):
        raise DtemError(
            "the hidden states lost their token sizes on the way to the pooling, which needs them: a hook has replaced "
            "them by a copy. Remove it, or set handle.r = 0"
        )
    carried: Tensor | None = getattr(x, name)
    return carried


class MergingLayerNorm(nn.LayerNorm):
    """The last norm of a patched model: its output carries the token sizes of its input."""

    def forward(self, x: Any) -> Tensor:
        y = super().forward(x)
        return with_sizes(y, x.dtem_size, x.dtem_bias) if hasattr(x, "dtem_size") else y


class MergingAttentionPool(nn.MultiheadAttention):
    """Attention pooling in which a token of size m counts as m tokens."""

    merger: Merger
    """A plain attribute, as in `MergingLayers`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        bias = carried(key, "dtem_bias") if self.merger.active else None
        if bias is not None:
            kwargs["key_padding_mask"] = bias.to(query.dtype)
        return super().forward(query, key, value, *args, **kwargs)


@dataclass(frozen=True)
class HostLayout:
    """Where a model of transformers has its parts, and how it pools tokens."""

    layers: str
    """Path to the list of layers, from the image encoder."""
    norm: str | None
    """Path to the last norm of the image encoder, if all tokens go through it; a LayerNorm carries their sizes on."""
    encoder: str = ""
    """Path to the image encoder; empty if it is the model itself."""
    pooling: str = "prefix"
    """As in `HostSpec`."""
    replaced: tuple[tuple[str, type[nn.Module]], ...] = ()
    """Paths to further modules of the image encoder, if it has them, and the classes that they get while patched."""


AFTER_LAYERS = ("post_layernorm", "head.layernorm", "head.mlp")
"""Modules of image encoders that read merged tokens, where they are no last norm of all tokens."""


def register_output_capture(cls: type) -> None:
    """Give a subclass the recordable outputs (hidden states, attentions) of its host, which are looked up by class."""
    if recordable := getattr(cls, "_can_record_outputs", None):
        _CAN_RECORD_REGISTRY[str(cls)] = recordable


class Merging:
    """Mixin of the patched classes. `self` is a model of transformers with a `dtem` submodule."""

    dtem: Merger
    layout: ClassVar[HostLayout]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_output_capture(cls)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebind(self)
        host: Any = super()
        return host.forward(*args, **kwargs)

    def set_grad_checkpointing(self: Any, enable: bool = True) -> None:
        """As in timm's models."""
        self.gradient_checkpointing_enable() if enable else self.gradient_checkpointing_disable()

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the host as if it were not patched; `dtem.save_pretrained` saves the adapter."""
        merger = self.dtem
        integrations.detach(self)
        try:
            return self.save_pretrained(*args, **kwargs)
        finally:
            integrations.attach(self, merger)


class MeanPooled(Merging):
    """Mixin of classifiers that average patches: here by token size."""

    with_class_token: ClassVar[bool] = False
    """Whether the class token is concatenated with the mean."""

    @can_return_tuple
    def forward(
        self: Any, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """As the host's."""
        if not self.dtem.active:
            host: Any = super()
            return host.forward(pixel_values=pixel_values, labels=labels, **kwargs)
        rebind(self)
        x = encoder_of(self)(pixel_values, **kwargs).last_hidden_state
        pooled = size_weighted_mean(x, self.dtem.method.host.prefix)
        logits = self.classifier(torch.cat([x[:, 0], pooled], dim=1) if self.with_class_token else pooled)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)


def size_weighted_mean(x: Tensor, prefix: int) -> Tensor:
    """Mean of the patch tokens, weighted by the sizes that x carries."""
    size = carried(x, "dtem_size")
    if size is None:
        return x[:, prefix:].mean(dim=1)
    size = size[:, prefix:]
    return ((size / size.sum(dim=1, keepdim=True)).to(x.dtype).unsqueeze(1) @ x[:, prefix:]).squeeze(1)


def merging_class(
    module: str, host: type[nn.Module], layout: HostLayout, mixin: type = Merging, **attributes: Any
) -> Any:
    """The class of a patched `host`, called Merging<Host>. It pickles if it is assigned to that name in `module`."""
    namespace = {"__module__": module, "__doc__": f"transformers' {host.__name__}, merging.", "layout": layout}
    return type(f"Merging{host.__name__}", (mixin, host), namespace | attributes)


class HfIntegration(Integration):
    """Base of the transformers integrations: the classes that they support, and how to split a layer."""

    provides: ClassVar[frozenset[str]] = frozenset({"input", "q", "k", "v", "key_projection"})
    layers: ClassVar[type[MergingLayers]]
    merged: ClassVar[dict[type[nn.Module], Any]]
    """Each supported class and its patched class."""
    refused: ClassVar[dict[type[nn.Module], str]] = {}
    """Classes of the family that are not supported, and why."""

    @abstractmethod
    def prefix(self, encoder: Any) -> tuple[int, bool]:
        """Number of prefix tokens, and whether the first is a class token."""

    def refusal(self, model: nn.Module) -> str | None:
        if type(model) in self.merged:
            return None
        if type(model) in self.refused:
            return self.refused[type(model)]
        if isinstance(model, tuple(self.merged)):
            return f"it is a subclass of transformers' {type(model).__mro__[1].__name__}, perhaps with another forward"
        return ""

    def describe(self, model: Any) -> HostSpec:
        layout = self.merged[type(model)].layout
        encoder = model.get_submodule(layout.encoder)
        config = encoder.config
        prefix, class_token = self.prefix(encoder)
        patch_height, patch_width = _pair(config.patch_size)
        height, width = getattr(model, "dtem_image_size", None) or _image_size(config)
        headless = layout.pooling == "attention" and not getattr(encoder, "use_head", True)
        norms, biases = find_affine(model, self.affine_roots(model, layout))
        return HostSpec(
            name=name_of(model),
            family=self.family,
            depth=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=getattr(encoder.get_submodule(layout.layers)[0], self.layers.attention).head_dim,
            prefix=prefix,
            patches=(height // patch_height) * (width // patch_width),
            pooling="none" if headless else layout.pooling,
            image=(config.num_channels, height, width),
            class_token=class_token,
            norms=norms,
            biases=biases,
        )

    def affine_roots(self, model: Any, layout: HostLayout) -> tuple[str, ...]:
        """Submodules whose norms see merged tokens."""
        within = f"{layout.encoder}." if layout.encoder else ""
        roots = [f"{within}{layout.layers}", *([] if layout.norm is None else [f"{within}{layout.norm}"])]
        names = {name for name, _ in model.named_modules()}
        return tuple(roots + [name for name in (f"{within}{after}" for after in AFTER_LAYERS) if name in names])

    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        layout = getattr(model, "layout", None) or self.merged[type(model)].layout  # of a patched model, or not yet
        layers = model.get_submodule(layout.encoder).get_submodule(layout.layers)
        return [head_mean_keys(getattr(layer, self.layers.attention)) for layer in layers._modules.values()]

    def encoder(self, model: Any) -> nn.Module:
        return encoder_of(model)

    def attach(self, model: Any, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = self.merged[type(model)]
        layers = layers_of(model)
        layers.__class__ = self.layers
        layers.__dict__["merger"] = merger
        for module, merging in _after_layers(model):
            module.__class__ = merging
            module.__dict__["merger"] = merger

    def detach(self, model: Any) -> None:
        for module, merging in _after_layers(model):
            module.__class__ = merging.__mro__[1]
            del module.__dict__["merger"]
        layers = layers_of(model)
        del layers.__dict__["merger"]
        layers.__class__ = nn.ModuleList
        model.__class__ = next(cls for cls in type(model).__mro__ if not issubclass(cls, Merging))
        del model.dtem


def encoder_of(model: Any) -> Any:
    """The image encoder of a patched model."""
    return model.get_submodule(model.layout.encoder)


def layers_of(model: Any) -> Any:
    """The list of layers of a patched model."""
    return encoder_of(model).get_submodule(model.layout.layers)


def rebind(model: Any) -> None:
    """In a replica of DataParallel, point the layers to the replica's merger: plain attributes are not replicated."""
    if getattr(model, "_is_replica", False):
        for module in (layers_of(model), *(module for module, _ in _after_layers(model))):
            module.__dict__["merger"] = model.dtem
        affine.rebind(model)


def _after_layers(model: Any) -> Iterable[tuple[nn.Module, type[nn.Module]]]:
    """Modules after the layers that need token sizes, and their patched classes."""
    encoder = encoder_of(model)
    modules = dict(encoder.named_modules())
    if model.layout.norm is not None and isinstance(modules[model.layout.norm], nn.LayerNorm):
        yield modules[model.layout.norm], MergingLayerNorm
    for path, merging in model.layout.replaced:
        if path in modules:
            yield modules[path], merging


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _image_size(config: Any) -> tuple[int, int]:
    """Height and width of an image; where it is free (NaFlex), of a square one with all position embeddings."""
    if hasattr(config, "image_size"):
        return _pair(config.image_size)
    side = round(config.num_patches**0.5) * config.patch_size
    return side, side


def name_of(model: Any) -> str:
    """The Hub id of the weights; the name of the class for a local folder or random weights."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not os.path.isdir(name) else type(model).__name__
