"""What all adapters of transformers share.

The host's own forward runs, with one thing replaced: its list of layers. While there is something to merge, the list
hands out itself as the only layer, and calling it walks through all of them, with token sizes as local variables. So
embeddings, masks, poolers and heads stay the host's. Hidden states carry their sizes (`dtem_size`) to whatever
averages or attends over them.
"""

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GitVisionModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from dtem import adapters, ops
from dtem.adapters.base import Adapter, Attention, Merger, Mlp, current_trace, finish, walk
from dtem.types import DtemError, HostSpec, Taps


def heads(attn: nn.Module, h: Tensor, bias: Tensor | None, scale: float, dropout: float) -> tuple[Tensor, Taps]:
    """What the heads say, side by side, for an attention with q_proj, k_proj and v_proj."""
    shape = (*h.shape[:2], -1, attn.head_dim)
    q, k, v = (project(h).view(shape).transpose(1, 2) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    y = ops.attend(q, k, v, bias, scale, dropout if attn.training else 0.0)
    return y.transpose(1, 2).flatten(2), Taps(h, q, k, v, scale)


@torch.no_grad()
def head_mean_keys(attn: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The head-mean of the key projection."""
    weight, bias = attn.k_proj.weight, attn.k_proj.bias
    split = (-1, attn.head_dim)
    return weight.unflatten(0, split).mean(dim=0), None if bias is None else bias.unflatten(0, split).mean(dim=0)


class Layers(nn.ModuleList):
    """A host's list of layers, merging. The halves of a layer come from a subclass."""

    merger: Merger | None = None
    """Not a submodule: the model has it already."""

    @abstractmethod
    def halves(self, layer: Any) -> tuple[Attention, Mlp]:
        """The two halves of a layer, as `run_block` calls them."""

    def __iter__(self) -> Iterator[nn.Module]:
        walks = self.merger is not None and (self.merger.active or current_trace() is not None)
        return iter((self,)) if walks else super().__iter__()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """All layers, one after the other."""
        assert self.merger is not None
        if attention_mask is not None:
            raise DtemError("attention_mask cannot be used while tokens are merged; set handle.r = 0")
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise DtemError(f"{name} asks for every token in its place, and tokens are merged; set handle.r = 0")
        method, layers = self.merger.method, list(self._modules.values())
        tokens = walk(self.merger, x, layers, self.halves, again=layers[0].gradient_checkpointing)
        finish(method, tokens)
        return _mark(tokens.x, tokens.size, method.bias(tokens))

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # the list's own would go through itself


def _mark(x: Tensor, size: Tensor | None, bias: Tensor | None) -> Tensor:
    x.dtem_size, x.dtem_bias = size, bias
    return x


class Norm(nn.LayerNorm):
    """The last norm: what comes out carries the sizes of what went in."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return _mark(y, x.dtem_size, x.dtem_bias) if hasattr(x, "dtem_size") else y


class PoolingAttention(nn.MultiheadAttention):
    """Attention pooling: a token of size m counts as m tokens."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        bias = getattr(key, "dtem_bias", None)
        if bias is not None:
            kwargs["key_padding_mask"] = bias.to(query.dtype)
        return super().forward(query, key, value, **kwargs)


@dataclass(frozen=True)
class Anatomy:
    """Where a model has its parts, and how it reads tokens."""

    layers: str
    """Path to the list of layers, from the tower."""
    norm: str | None
    """The tower's last norm, if all tokens go through it."""
    tower: str = ""
    """Path to the image encoder; empty where the model is one."""
    reads: str = "prefix"
    """The pooling of `HostSpec`."""


def records(cls: type) -> None:
    """Let a subclass of a host give hidden states as the host does: what can be captured is looked up by class."""
    if recorded := getattr(cls, "_can_record_outputs", None):
        _CAN_RECORD_REGISTRY[str(cls)] = recorded


class Merging:
    """Mixed into a host's class by `attach`. `self` is a model of transformers with a `dtem` submodule."""

    dtem: Merger
    anatomy: ClassVar[Anatomy]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        records(cls)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rebind(self)
        return super().forward(*args, **kwargs)

    def set_grad_checkpointing(self: Any, enable: bool = True) -> None:
        """As timm's models have it."""
        self.gradient_checkpointing_enable() if enable else self.gradient_checkpointing_disable()

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The host alone, as if it were not patched; `dtem.save` keeps what was trained."""
        merger = self.dtem
        adapter = adapters.load(merger.family)
        adapter.detach(self)
        try:
            return self.save_pretrained(*args, **kwargs)
        finally:
            adapter.attach(self, merger)


class MeanPooled(Merging):
    """A classifier that averages patches: it does so by size."""

    with_class: ClassVar[bool] = False
    """Whether the class token is joined to the mean."""

    @can_return_tuple
    def forward(
        self: Any, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """As the host's."""
        if not self.dtem.active:
            return super().forward(pixel_values=pixel_values, labels=labels, **kwargs)
        rebind(self)
        x = tower_of(self)(pixel_values, **kwargs).last_hidden_state
        pooled = sized_mean(x, self.dtem.method.host.prefix)
        logits = self.classifier(torch.cat([x[:, 0], pooled], dim=1) if self.with_class else pooled)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)


def sized_mean(x: Tensor, prefix: int) -> Tensor:
    """The mean over patches: of tokens, by the sizes that they carry."""
    size = getattr(x, "dtem_size", None)
    if size is None:
        return x[:, prefix:].mean(dim=1)
    size = size[:, prefix:]
    return ((size / size.sum(dim=1, keepdim=True)).to(x.dtype).unsqueeze(1) @ x[:, prefix:]).squeeze(1)


class HfAdapter(Adapter):
    """An adapter of transformers: the classes that it takes, and the layout of their layers."""

    provides: ClassVar[frozenset[str]] = frozenset({"input", "q", "k", "v", "key_projection"})
    layers: ClassVar[type[Layers]]
    merged: ClassVar[dict[type[nn.Module], type[Merging]]]
    """For each class that is taken, the class that it becomes."""
    refused: ClassVar[dict[type[nn.Module], str]] = {}
    """Classes of the family that are not, and why."""

    @abstractmethod
    def key_attention(self, layer: nn.Module) -> nn.Module:
        """A layer's attention, which has k_proj and head_dim."""

    @abstractmethod
    def prefix(self, tower: Any) -> tuple[int, bool]:
        """How many prefix tokens, and whether the first is a class token."""

    def refusal(self, model: nn.Module) -> str | None:
        if type(model) in self.merged:
            return None
        if type(model) in self.refused:
            return self.refused[type(model)]
        if isinstance(model, tuple(self.merged)):
            return f"it is a subclass of transformers' {type(model).__mro__[1].__name__}, perhaps with another forward"
        return ""

    def describe(self, model: Any) -> HostSpec:
        anatomy = self.merged[type(model)].anatomy
        tower = _at(model, anatomy.tower)
        config = tower.config
        prefix, class_token = self.prefix(tower)
        height, width = _pair(config.image_size)
        down, across = _pair(config.patch_size)
        return HostSpec(
            name=_name(model),
            family=self.family,
            depth=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=self.key_attention(_at(tower, anatomy.layers)[0]).head_dim,
            prefix=prefix,
            patches=(height // down) * (width // across),
            pooling=anatomy.reads,
            image=(config.num_channels, height, width),
            class_token=class_token,
        )

    def key_projections(self, model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
        anatomy = self.merged[type(model)].anatomy
        layers = _at(_at(model, anatomy.tower), anatomy.layers)
        return [head_mean_keys(self.key_attention(layer)) for layer in layers]

    def attach(self, model: Any, merger: Merger) -> None:
        model.dtem = merger
        model.__class__ = self.merged[type(model)]
        layers = layers_of(model)
        layers.__class__ = self.layers
        layers.__dict__["merger"] = merger
        for part, merged in _carriers(model):
            part.__class__ = merged

    def detach(self, model: Any) -> None:
        for part, merged in _carriers(model):
            part.__class__ = merged.__mro__[1]
        layers = layers_of(model)
        del layers.__dict__["merger"]
        layers.__class__ = nn.ModuleList
        model.__class__ = next(cls for cls in type(model).__mro__ if not issubclass(cls, Merging))
        del model.dtem


def tower_of(model: Any) -> Any:
    """The image encoder of a patched model."""
    return _at(model, model.anatomy.tower)


def layers_of(model: Any) -> Layers:
    """The list of layers of a patched model."""
    return _at(tower_of(model), model.anatomy.layers)


class Asked(nn.Module):
    """A model of transformers as a function of images: logits, or pooled features where it has no classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        seeing = getattr(getattr(self.model, "git", self.model), "image_encoder", self.model)  # of a captioner (GIT)
        out = getattr(seeing, "get_image_features", seeing)(pixel_values=images)
        for name in ("logits", "image_embeds", "pooler_output"):
            if getattr(out, name, None) is not None:
                return getattr(out, name)
        if isinstance(out, Tensor):
            return out
        return out.last_hidden_state.mean(dim=1) if isinstance(seeing, GitVisionModel) else out.last_hidden_state[:, 0]


def rebind(model: Any) -> None:
    """In a replica of DataParallel plain references still point at the original."""
    if getattr(model, "_is_replica", False):
        layers_of(model).__dict__["merger"] = model.dtem


def _carriers(model: Any) -> Iterable[tuple[nn.Module, type[nn.Module]]]:
    """Modules between the layers and whatever reads tokens, with the classes that they get."""
    tower = tower_of(model)
    if model.anatomy.norm is not None:
        yield _at(tower, model.anatomy.norm), Norm
    if model.anatomy.reads == "attention":
        yield tower.head.attention, PoolingAttention


def _at(model: Any, path: str) -> Any:
    return model.get_submodule(path)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _name(model: Any) -> str:
    """The Hub id that the weights were asked for by; of a folder, or without weights, that of the class."""
    asked = str(getattr(model.config, "_name_or_path", "") or "")
    return asked if re.fullmatch(r"\w[\w.-]*/[\w.-]+", asked) and not os.path.isdir(asked) else type(model).__name__
