"""Vision towers inside vision-language models: where they stop, and what their integrations share."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import CLIPVisionModel, SiglipVisionModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dtem.errors import DtemError
from dtem.integrations.base import Merger
from dtem.integrations.hf_base import HfIntegration, HostLayout, encoder_of, layers_of, merges, register_output_capture
from dtem.types import HostSpec


class SelectedStates:
    """In place of all hidden states of a tower: those after the one layer that was run last."""

    def __init__(self, states: Tensor, layer: int, count: int) -> None:
        self.states, self.layer, self.count = states, layer, count

    def __getitem__(self, index: int) -> Tensor:
        if index % self.count != self.layer:
            raise DtemError(
                f"vision_feature_layer = {index}: the model was patched for layer {self.layer - self.count} of its "
                "config, where its tower stops; set it in the config before dtem.patch, or set handle.r = 0"
            )
        return self.states


class MergingTower:
    """Mixin of patched towers: while tokens are merged, a tower stops at the layer that the host selects."""

    def forward(self: Any, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the host's."""
        layers = self.encoder.layers
        host: Any = super()
        if not merges(layers.merger) or layers.stop is None:
            return host.forward(pixel_values, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("output_hidden_states", "return_dict")}
        x = self.embeddings(pixel_values, interpolate_pos_encoding=kwargs.pop("interpolate_pos_encoding", False))
        if hasattr(self, "pre_layrnorm"):  # CLIP
            x = self.pre_layrnorm(x)
        y = self.encoder(inputs_embeds=x, **kwargs).last_hidden_state
        states: Any = SelectedStates(y, layers.stop, len(layers._modules) + 1)
        return BaseModelOutputWithPooling(last_hidden_state=y, hidden_states=states)


class TowerCLIP(MergingTower, CLIPVisionModel):  # type: ignore[no-untyped-call]
    """The CLIP tower of a patched model."""


class TowerSiglip(MergingTower, SiglipVisionModel):  # type: ignore[no-untyped-call]
    """The SigLIP tower of a patched model."""


TOWERS: dict[type[nn.Module], type[nn.Module]] = {CLIPVisionModel: TowerCLIP, SiglipVisionModel: TowerSiglip}
for _tower in TOWERS.values():
    register_output_capture(_tower)


def stop_of(model: Any, tower: Any) -> int | None:
    """Number of layers of the tower before the features that the host selects; None: it reads the tower's output."""
    layer = getattr(model.config, "vision_feature_layer", None)
    return None if layer is None else layer % (len(tower.encoder.layers._modules) + 1)


class VisionLanguage(HfIntegration):
    """Base of the integrations of vision-language models."""

    towers: ClassVar[tuple[type[nn.Module], ...]]
    """Supported classes of vision towers."""

    def refusal(self, model: Any) -> str | None:
        reason = super().refusal(model)
        if reason is not None:
            return reason
        tower = model.get_submodule(self.merged[type(model)].layout.encoder)
        if type(tower) not in self.towers:
            return f"its vision tower is a {type(tower).__name__}, not CLIP's or SigLIP's"
        layer = getattr(model.config, "vision_feature_layer", -1)
        if not isinstance(layer, int):
            return (
                f"vision_feature_layer = {layer}: it reads the tokens of several layers, which have different numbers "
                "of them"
            )
        if stop_of(model, tower) == 0:
            return f"vision_feature_layer = {layer}: it reads the tokens before the first layer, where none is merged"
        strategy = getattr(model.config, "vision_feature_select_strategy", "full")
        if strategy == "default" and not self.prefix(tower)[0]:
            return (
                "vision_feature_select_strategy = 'default' drops the first token, and a SigLIP tower has no class "
                "token there; set it to 'full' in the config"
            )
        return None

    def prefix(self, encoder: Any) -> tuple[int, bool]:
        has_class_token = isinstance(encoder, CLIPVisionModel)
        return int(has_class_token), has_class_token

    def describe(self, model: Any) -> HostSpec:
        host = super().describe(model)
        return replace(host, depth=self._stop(model) or host.depth)

    def affine_roots(self, model: Any, layout: HostLayout) -> tuple[str, ...]:
        layers = f"{layout.encoder}.{layout.layers}"
        used = range(self._stop(model) or len(model.get_submodule(layers)._modules))
        norm = [] if layout.norm is None else [f"{layout.encoder}.{layout.norm}"]
        return (*(f"{layers}.{layer}" for layer in used), *norm)

    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        return super().key_projections(model)[: self._stop(model)]

    def attach(self, model: Any, merger: Merger) -> None:
        super().attach(model, merger)
        tower = encoder_of(model)
        layers_of(model).__dict__["stop"] = stop_of(model, tower)
        tower.__class__ = TOWERS.get(type(tower), type(tower))

    def detach(self, model: Any) -> None:
        tower = encoder_of(model)
        tower.__class__ = next((host for host, ours in TOWERS.items() if type(tower) is ours), type(tower))
        del layers_of(model).__dict__["stop"]
        super().detach(model)

    def _stop(self, model: Any) -> int | None:
        layout = getattr(model, "layout", None) or self.merged[type(model)].layout
        return stop_of(model, model.get_submodule(layout.encoder))
