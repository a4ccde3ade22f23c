"""Shared code of all integrations: the forward through the blocks, and the state of a patched model."""

import contextlib
import dataclasses
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dtem import schedule as schedules
from dtem.errors import DtemError
from dtem.integrations.recording import AuxiliaryLosses, Recorders, Trace, current_recorder, recording
from dtem.integrations.replay import Replay
from dtem.methods import Method
from dtem.types import HostSpec, Taps, Tokens

if TYPE_CHECKING:
    from dtem.measure.tuned import TunedPlan

Attention = Callable[[Tensor, Tensor | None], tuple[Tensor, Taps]]
"""(x, bias by key) -> x with the attention residual added, and the taps."""
Mlp = Callable[[Tensor], Tensor]
"""x -> x with the MLP residual added."""


class Merger(nn.Module):
    """The submodule `dtem` of a patched model: the method, the schedule and what is being recorded."""

    def __init__(self, method: Method, schedule: schedules.BlockRates, family: str, shortcut: bool = False) -> None:
        super().__init__()
        self.method = method
        self.schedule = schedule
        self.requested_r: object = schedule
        """The schedule as the user gave it, e.g. a budget before it was solved."""
        self.family = family
        self.shortcut = shortcut
        self.register_load_state_dict_post_hook(_allow_missing)  # type: ignore[no-untyped-call]
        method.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        self.on_host_change: Callable[[nn.Module], None] | None = None
        """Called when the image size or the pooling of the host has changed."""
        self.loaded_with_host = False
        """Whether the last state dict that was loaded into the model held the method's parameters too."""
        self.loads_whole_model = False
        """Whether a state dict is being loaded into the model now, not into its encoder alone."""
        self.awaits_weights = False
        """Whether the model was patched on the meta device, so that the method is not initialised yet."""
        self.tuned: TunedPlan | None = None
        """The plan that `dtem.tune` chose, or that came with the adapter."""
        self.replay: Replay | None = None
        """Set while plans are compared (`tuning.search`)."""
        self._warned_of: set[str] = set()
        self.mark_untrained()
        self._traces: Recorders[Trace] = {}
        self._losses: Recorders[AuxiliaryLosses] = {}
        self.fast_blocks: Any = None
        """What `integrations.fast_block` has read of the host's blocks."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is not being recorded."""
        return {**self.__dict__, "_traces": {}, "_losses": {}, "fast_blocks": None, "replay": None}

    def change_host(self, model: nn.Module, **changes: Any) -> None:
        """Update what the method knows of the host, and check or solve r for it again."""
        self.method.host = dataclasses.replace(self.method.host, **changes)
        if self.on_host_change is not None:
            self.on_host_change(model)

    def mark_untrained(self) -> None:
        """The method's parameters are as they were initialised."""
        self._initial = self._stored = _checksum(self.method)

    def mark_stored(self) -> None:
        """The method's parameters are held elsewhere too: they were read, to be saved, or come from a file."""
        self._stored = _checksum(self.method)

    @property
    def is_untrained(self) -> bool:
        """Whether the method's parameters are still as they were initialised."""
        return self._initial == _checksum(self.method)

    @property
    def is_unsaved(self) -> bool:
        """Whether the method's parameters have values that were trained and never read to be saved."""
        now = _checksum(self.method)
        return now is not None and now not in (self._initial, self._stored) and len(now) == len(self._initial or ())

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module. To convert or move parameters is not to train them."""
        untrained, unsaved = self.is_untrained, self.is_unsaved
        moved = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if untrained:
            self.mark_untrained()
        elif not unsaved:
            self.mark_stored()
        return moved

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: a patched model has the state dict of its host. Adapter files hold what was trained."""
        live = kwargs.get("keep_vars", len(args) > 2 and args[2])  # not to be saved: torch.export asks so
        if not live and "unsaved" not in self._warned_of and self.is_unsaved:
            self.warn_once(
                "unsaved",
                f"the state dict of a patched model is that of its host: the trained {self.method.name} parameters "
                "are not in it. Save them with handle.save_pretrained(path), or all in one with "
                "{**handle.state_dict(), **model.state_dict()}",
            )
        destination: dict[str, Any] = kwargs.get("destination") or (args[0] if args else {})
        return destination

    def method_state_dict(self) -> dict[str, Any]:
        """The method's state dict, to be saved: whole tensors. Of a sharded model, all processes must call it."""
        if is_quantised(self.method):
            raise DtemError(QUANTISED)
        state = {name: _whole(name, part) for name, part in self.method.state_dict().items()}
        self.mark_stored()
        return state

    def warn_once(self, reason: str, message: str) -> None:
        """Warn, unless this model has warned for the same reason already."""
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            warnings.warn(message, stacklevel=4)

    @property
    def schedule(self) -> schedules.BlockRates:
        """r of every block, resolved."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: schedules.BlockRates) -> None:
        host = self.method.host
        self._schedule = schedule
        self.active = any(schedule.per_block(host.depth))
        """Whether any block reduces tokens; if not, the host's own forward runs."""
        available = host.patches * (host.depth if self.method.resets_each_block else 1)
        self.merged_share = sum(self.plan(host.patches)) / available
        """Share of the patches that all blocks merge, at the host's own image size (`methods.affine`)."""

    @property
    def trace(self) -> Trace | None:
        """The active trace of this model, if any; None in a compiled graph."""
        return None if torch.compiler.is_compiling() else current_recorder(self._traces)

    def plan(self, patches: int) -> tuple[int, ...]:
        """r of every block for an image of `patches` patches."""
        resolve = schedules.resolve if torch.compiler.is_compiling() else _resolve_once
        return resolve(self.schedule, patches, self.method.host.depth, self.method.resets_each_block)

    def check_blocks(self, blocks: Any, attention: str) -> None:
        """Before blocks run with merging: refuse what would go wrong silently, warn of what has no effect.

        Args:
            blocks: the list of all of the host's.
            attention: name of a block's attention, which dtem does not call as a whole, like the block itself.
        """
        if len(blocks) != self.method.host.depth:
            raise DtemError(
                f"the model has {len(blocks)} blocks, but had {self.method.host.depth} when it was patched: unpatch "
                "it, change its blocks, and patch it again"
            )
        if torch.compiler.is_compiling():
            return
        if torch._C._get_tracing_state() is not None:
            raise DtemError(
                "torch.jit.trace (and the ONNX exporter that is built on it) would fix the batch size and the matching "
                "of merged tokens: export with dtem.export, count with dtem.count_flops, or set handle.r = 0"
            )
        for layer, block in enumerate(blocks):
            for module in (block, getattr(block, attention)):
                if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
                    self._check_uncalled(module, f"{type(module).__name__} of block {layer}")

    def _check_uncalled(self, module: nn.Module, name: str) -> None:
        if is_fully_sharded(module):
            raise DtemError(
                f"the {name} is sharded on its own (fully_shard), but while tokens are merged it is not called as a "
                "whole, so its weights are not gathered: call fully_shard on the whole model only, or set handle.r = 0"
            )
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = [hook for hook in hooks if getattr(hook, "__module__", None) != "transformers.utils.output_capturing"]
        # accelerate hooks the modules inside too; transformers leaves hooks that record on request only
        if not hasattr(module, "_hf_hook") and (own or "forward" in module.__dict__):
            self.warn_once(
                "hooks",
                f"the {name} has hooks or a forward of its own, which have no effect while tokens are merged: dtem "
                "calls the modules inside one by one. Hook those (norms, linear layers, the MLP), or set handle.r = 0",
            )

    def tracing(self) -> contextlib.AbstractContextManager[Trace]:
        """Record every forward of this model, from any thread that has no trace of its own."""
        return recording(self._traces, Trace())

    def collecting_losses(self) -> contextlib.AbstractContextManager[AuxiliaryLosses]:
        """Collect the auxiliary losses of this model's soft forwards, from the same threads as `tracing`."""
        return recording(self._losses, AuxiliaryLosses())

    def finish(self, tokens: Tokens) -> None:
        """Called after the last block: collects the auxiliary losses (not in a compiled graph)."""
        losses = None if torch.compiler.is_compiling() else current_recorder(self._losses)
        if losses is not None and self.method.soft:
            losses.update(self.method.losses(tokens))
            losses.merge_candidates += self.method.merge_candidates(tokens)


def _checksum(method: nn.Module) -> tuple[float, ...] | None:
    """One number per parameter, by which a change is seen; None if they are quantised."""
    parameters: list[Any] = list(method.parameters())
    parts = [part.to_local() if is_sharded(part) else part for part in parameters]
    if any(type(part) not in (nn.Parameter, Tensor) for part in parts):
        return None
    return tuple(0.0 if part.is_meta else part.detach().double().sum().item() for part in parts)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether fully_shard (FSDP2) was called on this module."""
    return any(cls.__module__.startswith("torch.distributed.fsdp") for cls in type(module).__mro__)


def is_sharded(part: Any) -> bool:
    """Whether this is a DTensor, as fully_shard makes them. (Its module is slow to import.)"""
    return hasattr(part, "placements") and hasattr(part, "full_tensor")


def is_quantised(method: nn.Module) -> bool:
    """Whether the method was quantised along with its host, by torchao or torch.ao."""
    plain = all(type(part) in (nn.Parameter, Tensor) or is_sharded(part) for part in method.parameters())
    return not plain or any(type(module).__module__.startswith("torch.ao.") for module in method.modules())


QUANTISED = (
    "the method was quantised along with its host, so its trained values are not there any more: save or load the "
    "adapter before, or leave modules out of quantising whose names begin with 'dtem.'"
)


def _whole(name: str, part: Any) -> Any:
    """A part of a state dict, gathered if it is sharded."""
    if getattr(part, "is_meta", False):
        raise DtemError(f"{name} has no values here (offloaded by accelerate, or on the meta device): save it before")
    return part.full_tensor() if is_sharded(part) else part


def _before_load(method: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before a state dict is loaded: whole tensors go into sharded parameters, nothing into quantised ones."""
    own = [name for name in state_dict if name.startswith(prefix)]
    if own and is_quantised(method):
        raise DtemError(QUANTISED)
    for name, current in method.state_dict().items() if own else ():  # where fully_shard shards again what it gathered
        part = state_dict.get(prefix + name)
        if is_sharded(current) and isinstance(part, Tensor) and not is_sharded(part):
            from torch.distributed.tensor import distribute_tensor

            part = part.to(current.device)
            state_dict[prefix + name] = distribute_tensor(part, current.device_mesh, current.placements)


def _allow_missing(merger: Any, incompatible_keys: Any) -> None:
    """A state dict of the host alone loads strictly into the patched model."""
    missing = incompatible_keys.missing_keys
    others = [name for name in missing if "dtem.method." not in name]
    merger.loaded_with_host = len(others) == len(missing)
    missing[:] = others
    if merger.loaded_with_host:
        merger.mark_stored()


_resolve_once = functools.lru_cache(maxsize=1024)(schedules.resolve)


class Integration(ABC):
    """Patches one family of host models. `dtem.register_integration` adds your own."""

    family: ClassVar[str]
    provides: ClassVar[frozenset[str]]
    """The taps that it provides (`Method.needs`)."""
    supported: ClassVar[str] = ""
    """Supported models, for error messages."""
    methods: ClassVar[frozenset[str] | None] = None
    """Names of the supported methods; None: all whose needs it provides."""
    methods_reason: ClassVar[str] = "where token features also hold positions"
    """Why other methods are not."""
    fixed_length: ClassVar[bool] = False
    """Whether all images must keep the same number of tokens, so that methods of variable length are refused."""
    shortcuts: ClassVar[bool] = False
    """Whether `patch(shortcut=True)` is supported."""

    @abstractmethod
    def refusal(self, model: nn.Module) -> str | None:
        """None: the model is supported. A text: why a model of this family is not. Empty: it is not of this family."""

    @abstractmethod
    def describe(self, model: Any) -> HostSpec:
        """The description of the host."""

    @abstractmethod
    def key_projections(self, model: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Per block, the head-mean of the key projection: weight (e, c) and bias (e)."""

    def encoder(self, model: Any) -> nn.Module:
        """The part of the model that holds the key projections, and may be loaded on its own."""
        return model

    @abstractmethod
    def attach(self, model: Any, merger: Merger) -> None:
        """Patch `model`, in place."""

    @abstractmethod
    def detach(self, model: Any) -> None:
        """Undo `attach`."""


def linear_weights(layer: Any) -> tuple[Any, Any]:
    """Weight and bias of a linear layer as plain tensors, also of one that is quantised or wrapped by LoRA."""
    layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    weight, bias = (part() if callable(part) else part for part in (layer.weight, layer.bias))
    if type(weight) not in (nn.Parameter, Tensor):
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.dequantize()
    elif weight.is_quantized:
        weight = weight.dequantize()
    return weight.detach(), None if bias is None else bias.detach()


def run_block(
    method: Method, layer: int, tokens: Tokens, r: int, attention: Attention, mlp: Mlp, unread: bool = False
) -> Tokens:
    """One block, in the steps of `methods.base`. With `unread`, only the prefix is read of what it returns."""
    tokens = method.before(layer, tokens, r)
    x, taps = attention(tokens.x, method.bias(tokens))
    if unread and r and method.merges_only and not method.soft:
        tokens = Tokens(x[:, : x.shape[1] - r].contiguous(), carry=tokens.carry)
    else:
        tokens = method.reduce(layer, tokens.replace(x=x), taps, r)
    tokens = tokens.replace(x=mlp(tokens.x))
    return method.after(layer, tokens, r)


def run_blocks(
    merger: Merger,
    x: Tensor,
    blocks: Iterable[Any],
    split_block: Callable[[Any], tuple[Attention, Mlp]],
    checkpointing: bool = False,
    on_block: Callable[[Tokens], None] | None = None,
    only_prefix: bool = False,
    real: Tensor | None = None,
    track: bool = False,
) -> Tokens:
    """Run `blocks` (the first ones of the host, or all) with token reduction.

    Args:
        merger: the state of the patched model.
        x: all tokens, prefix first.
        blocks: the host's.
        split_block: gives the attention and the MLP of a block, each with its residual added.
        checkpointing: gradient checkpointing.
        on_block: called with the tokens after every block, which then have a source map.
        only_prefix: only the prefix is read of the result, so the last block may drop patches instead of merging.
        real: which tokens are no padding, (b, n); None: all.
        track: keep a source map in soft mode too, where every patch keeps a token of its own.
    """
    method, prefix = merger.method, merger.method.host.prefix
    patches = x.shape[1] - prefix
    trace = merger.trace
    source = None
    if track or ((trace is not None or on_block is not None) and not method.soft):
        source = torch.arange(prefix, prefix + patches, device=x.device).expand(x.shape[0], -1)
    tokens, replay = Tokens(x, source=source), merger.replay
    if real is not None:
        source = None if source is None else source.masked_fill(~real[:, prefix:], -1)
        tokens = tokens.replace(size=real.float(), source=source, padded=True)
    first = 0
    if replay is not None and replay.tokens is not None:
        tokens, first = replay.tokens, replay.start
    for layer, (block, r) in enumerate(zip(blocks, merger.plan(patches), strict=False)):
        if layer < first:
            continue
        attention, mlp = split_block(block)
        if checkpointing and torch.is_grad_enabled():
            step = functools.partial(run_block, method, layer, r=r, attention=attention, mlp=mlp)
            tokens = checkpointed(step, tokens)
        else:
            unread = only_prefix and trace is None and layer == method.host.depth - 1
            tokens = run_block(method, layer, tokens, r, attention, mlp, unread)
        if replay is not None:
            replay.after.append(tokens)
        if trace is not None:
            trace.record(tokens)
        if on_block is not None:
            on_block(tokens)
    return tokens


def checkpointed(run: Callable[..., Any], *args: Any) -> Any:
    """Gradient checkpointing (not reentrant, so that token sizes get gradients, too)."""
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
