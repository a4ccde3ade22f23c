"""`dtem.patch`, and the handle that controls a patched model."""

import contextlib
import functools
import os
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from dtem import integrations, methods
from dtem import schedule as schedules
from dtem.errors import DtemError
from dtem.integrations import AuxiliaryLosses, Merger, Trace
from dtem.measure import flops, tuned
from dtem.methods import Config, Method
from dtem.methods.base import check_soft_pooling
from dtem.types import HostSpec


def patch(
    model: nn.Module, method: str | Config = "dtem", r: object = 0, *, shortcut: bool = False, **options: Any
) -> "Handle":
    """Patch `model` to merge tokens, in place. Returns the handle that controls it.

    Args:
        model: a supported model, e.g. ``timm.create_model("deit_small_patch16_224")``.
        method: name of the reduction method, or its config. An untrained ``"dtem"`` is ``"tome"``.
        r: tokens removed per block: ``16``, or any other schedule of `dtem.schedule`.
        shortcut: compute only the class token in the last block, where only that is read. Exact up to rounding.
        options: the method's settings (the fields of its config), where `method` is a name.

    Examples:
        >>> handle = dtem.patch(model, r=16)
        >>> handle.r = 8
        >>> handle.unpatch()
        >>> handle = dtem.patch(model, dtem.DtemConfig(temperature=0.3), r=16)
    """
    model = integrations.unwrap(model)
    if isinstance(getattr(model, "dtem", None), Merger):
        raise DtemError(
            f"{type(model).__name__} is patched already; dtem.Handle(model) controls it, or unpatch it first"
        )
    integration = integrations.find(model)
    host = integration.describe(model)
    if isinstance(method, Config):
        if options:
            raise DtemError(f"{', '.join(options)}: with a {type(method).__name__}, set options there, not as keywords")
        cls = methods.find_by_config(method, host.dense)
    else:
        cls = methods.find(method, host.dense)
    missing = cls.needs - integration.provides - host.provides
    if missing:
        listed = ", ".join(sorted(missing))
        raise DtemError(
            f"method {cls.name!r} needs {listed}, which {host.name} ({integration.family}) does not provide"
        )
    if integration.methods is not None and cls.name not in integration.methods:
        raise DtemError(
            f"method {cls.name!r} is not supported for {host.name} ({integration.family}), "
            f"{integration.methods_reason}; choose one of: {', '.join(sorted(integration.methods))}"
        )
    if integration.fixed_length and cls.variable_length:
        raise DtemError(
            f"method {cls.name!r} keeps a different number of tokens in each image, and {host.name} "
            f"({integration.family}) needs the same number in all; choose another method"
        )
    if shortcut and not integration.shortcuts:
        raise DtemError(f"shortcut=True is not supported for {host.name} ({integration.family}); leave it out")
    schedules.check(schedules.parse(r), host.patches, host.depth)
    with torch.inference_mode(False):  # its tensors could never be trained
        instance = cls(host, method) if isinstance(method, Config) else cls.create(host, options)
        projections = integration.key_projections(model)
        weight = projections[0][0]
        if weight.is_meta and next(instance.parameters(), None) is not None and _is_offloaded(model):
            raise DtemError(
                f"the weights of {host.name} are offloaded (accelerate), so the embeddings cannot start from them: "
                "call dtem.patch before cpu_offload or dispatch_model"
            )
        instance.to_empty(device="meta") if weight.is_meta else instance.to(weight)
        instance.init_from_host(model, projections)
    instance.train(model.training)
    merger = Merger(instance, schedules.Constant(0), integration.family, shortcut)
    merger.on_host_change = renew_r
    merger.awaits_weights = weight.is_meta
    integrations.attach(model, merger)
    _follow_weights(model, integration.encoder(model))
    handle = Handle(model)
    try:
        handle.r = r
    except DtemError:
        handle.unpatch()
        raise
    return handle


class Handle:
    """Controls a patched model. It has no state: `Handle(model)` works for every patched model, e.g. a copy.

    Examples:
        >>> handle = dtem.patch(model, r=16)
        >>> with handle.at(r=8):
        ...     logits = model(images)
        >>> handle.save_pretrained("my.safetensors")
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = integrations.unwrap(model)
        self.merger  # noqa: B018 - refuses a model that is not patched

    @property
    def merger(self) -> Merger:
        """The state of the patched model (its submodule ``dtem``)."""
        merger = getattr(self.model, "dtem", None)
        if not isinstance(merger, Merger):
            raise DtemError(f"{type(self.model).__name__} is not patched; call dtem.patch(model) first")
        return merger

    @property
    def method(self) -> Method:
        """The method object, with its trained parts."""
        return self.merger.method

    @property
    def host(self) -> HostSpec:
        """The description of the model."""
        return self.method.host

    @property
    def r(self) -> object:
        """The schedule as it was set. It can be changed at any time."""
        return self.merger.requested_r

    @r.setter
    def r(self, spec: object) -> None:
        parsed = schedules.for_first_blocks(schedules.parse(spec), self.host.num_merge_blocks)
        schedules.check(parsed, self.host.patches, self.host.depth, self.method.stages)
        if isinstance(parsed, schedules.Budget):
            parsed = self._solve(parsed)
        elif isinstance(parsed, schedules.Latency):
            parsed = tuned.solve_latency(self.model, parsed, self.stages)
        elif isinstance(parsed, schedules.Tuned):
            parsed = schedules.PerLayer(tuned.tuned_plan(self.model).plan)
        elif isinstance(parsed, schedules.Learned):
            parsed = self._learned()
        self.merger.schedule = parsed
        self.merger.requested_r = spec

    def _learned(self) -> schedules.PerLayer:
        """The learned schedule as it is now; set ``handle.r = "learned"`` again after more training."""
        learned = self.method.schedule()
        if learned is None:
            raise DtemError(f"r = 'learned', but method {self.method.name!r} learns no schedule; give a number")
        return schedules.PerLayer(learned)

    @property
    def mode(self) -> str:
        """``"hard"`` (inference) or ``"soft"`` (differentiable, for training)."""
        return "soft" if self.method.soft else "hard"

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in ("hard", "soft"):
            raise DtemError(f"mode = {mode!r} is not known; choose 'hard' or 'soft'")
        if mode == "soft" and not self.method.has_soft_mode():
            raise DtemError(f"method {self.method.name!r} has no soft mode")
        if mode == "soft":
            check_soft_pooling(self.host.pooling)
        self.method.soft = mode == "soft"

    @contextlib.contextmanager
    def at(self, r: object = None, mode: str | None = None) -> Iterator["Handle"]:
        """Set the schedule or the mode inside a ``with`` block; both are restored after it.

        They belong to the model, not to a thread: all threads that run it meanwhile run with them. Threads that need
        different r take a copy each (`copy.deepcopy`; weights can be shared).

        Examples:
            >>> with handle.at(r=8):
            ...     logits = model(images)
        """
        merger, soft = self.merger, self.method.soft
        before = merger.schedule, merger.requested_r
        try:
            if mode is not None:
                self.mode = mode
            if r is not None:
                self.r = r
            yield self
        finally:
            merger.schedule, merger.requested_r = before
            merger.method.soft = soft

    @property
    def plan(self) -> tuple[int, ...]:
        """r of every block at the host's own image size, after clamping."""
        return self.merger.plan(self.host.patches)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens after every block at the host's own image size (all, if the method restores them)."""
        plan = [0] * self.host.depth if self.method.restores else self.plan
        return schedules.tokens(plan, self.host.patches, self.host.prefix)

    def gflops(self, plan: tuple[int, ...]) -> float:
        """GFLOPs (MACs) of one image by a plan, one r per block, with hard merging."""
        with self.at(r=schedules.PerLayer(plan), mode="hard"):
            return flops.count(self.model, self.host.image).macs / 1e9

    def _solve(self, budget: schedules.Budget) -> schedules.PerLayer:
        resets = self.method.resets_each_block
        return budget.solve(self.host.patches, self.host.depth, self.gflops, self.stages, resets)

    @property
    def stages(self) -> Collection[int] | None:
        """The blocks in which a budget or a tuned plan may remove tokens; None: all."""
        stages, first = self.method.budget_blocks, self.host.num_merge_blocks
        if first is None:
            return stages
        return [layer for layer in (range(first) if stages is None else stages) if layer < first]

    def parameters(self) -> Iterator[Parameter]:
        """The trainable parameters of the method, for the optimiser of your own training loop.

        Examples:
            >>> model.requires_grad_(False)
            >>> handle = dtem.patch(model, r=16)
            >>> handle.mode = "soft"
            >>> optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-3)
        """
        return (parameter for parameter in self.method.parameters() if parameter.requires_grad)

    def state_dict(self) -> dict[str, Any]:
        """The method's parameters under the names that they have in the model, which its own state dict leaves out.

        Whole tensors, also of a model that is sharded (FSDP2): then all processes must call it.

        Examples:
            >>> state = {**handle.state_dict(), **model.state_dict()}  # for tools that need all, such as cpu_offload
            >>> model.load_state_dict(state)
        """
        return {f"dtem.method.{name}": part for name, part in self.merger.method_state_dict().items()}

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record which patches are in which token, in every forward of this model.

        That includes forwards in other threads that have no trace of their own; forwards of other patched models are
        not recorded. Compiled models record nothing: trace the model itself.

        Examples:
            >>> with handle.trace() as trace:
            ...     model(images)
            >>> trace.sources[-1]      # (batch, patches): the token that holds each patch after the last block
        """
        with self.merger.tracing() as trace:
            yield trace
        if not trace.sizes:
            warnings.warn(
                "handle.trace() recorded nothing: the model was not called inside, or only as a compiled model "
                "(torch.compile), which cannot be traced; call the uncompiled model",
                stacklevel=3,
            )

    def auxiliary_losses(self) -> contextlib.AbstractContextManager[AuxiliaryLosses]:
        """Collect the auxiliary losses of the method (DynamicViT, DiffRate) by name, from soft forwards of this model.

        Examples:
            >>> with handle.auxiliary_losses() as losses:
            ...     loss = criterion(model(images), labels)
            >>> loss = loss + sum(losses.values())
        """
        return self.merger.collecting_losses()

    def save_pretrained(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the adapter; see `dtem.save_pretrained`."""
        from dtem.adapters import storage

        storage.save_pretrained(self, path, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the adapter; see `dtem.push_to_hub`."""
        from dtem.adapters import publish

        return publish.push_to_hub(self, repo_id, **options)

    def unpatch(self) -> nn.Module:
        """Restore the model as it was before `patch`, and return it."""
        self.merger  # noqa: B018 - refuses a model that is not patched
        encoder = integrations.load(self.merger.family).encoder(self.model)
        integrations.detach(self.model)
        for hooks in (
            self.model._load_state_dict_pre_hooks,
            self.model._load_state_dict_post_hooks,
            encoder._load_state_dict_post_hooks,
        ):
            for key in [key for key, hook in hooks.items() if _function_of(hook) in WEIGHT_HOOKS]:
                del hooks[key]
        return self.model

    def __repr__(self) -> str:
        if not isinstance(getattr(self.model, "dtem", None), Merger):
            return f"Handle({type(self.model).__name__}, not patched)"
        return f"Handle({self.host.name}, method={self.method.name!r}, r={self.r}, mode={self.mode!r})"


def renew_r(model: nn.Module) -> None:
    """Check r, or solve its budget, again: the image size of the host has changed. If it cannot be met, r is 0."""
    handle = Handle(model)
    before = handle.r
    try:
        handle.r = before
    except DtemError as error:
        handle.r = 0
        raise DtemError(f"the model was changed, and r = {before!r} does not fit it, so r is 0 now: {error}") from error


def _follow_weights(model: nn.Module, encoder: nn.Module) -> None:
    """Call `follow_loaded_weights` when weights are loaded into the model, or into its encoder alone."""
    model.register_load_state_dict_pre_hook(_begin_loading)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(follow_loaded_weights)  # type: ignore[no-untyped-call]
    if encoder is not model:
        hook = functools.partial(_follow_encoder, model)
        encoder.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]


def _begin_loading(model: nn.Module, *args: Any) -> None:
    merger = getattr(model, "dtem", None)
    if isinstance(merger, Merger):
        merger.loads_whole_model = True


def _follow_encoder(model: nn.Module, encoder: nn.Module, incompatible_keys: Any) -> None:
    merger = getattr(model, "dtem", None)
    if isinstance(merger, Merger) and not merger.loads_whole_model:
        merger.loaded_with_host = False
        follow_loaded_weights(model, incompatible_keys)


def follow_loaded_weights(model: nn.Module, incompatible_keys: Any) -> None:
    """After the host's weights were loaded: untrained embeddings start from the new keys; for trained ones, warn."""
    merger = getattr(model, "dtem", None)
    if not isinstance(merger, Merger):
        return
    merger.loads_whole_model = False
    if next(merger.method.parameters(), None) is None:
        return
    if merger.loaded_with_host:
        merger.awaits_weights = False
    elif merger.awaits_weights or merger.is_untrained:
        _initialise_again(model, merger)
    else:
        warnings.warn(
            f"weights were loaded into a patched {type(model).__name__} whose {merger.method.name} parameters were "
            "trained (or converted): they belong to the weights that it had before",
            stacklevel=2,
        )


@torch.inference_mode(False)
def _initialise_again(model: nn.Module, merger: Merger) -> None:
    projections = integrations.load(merger.family).key_projections(model)
    weight = projections[0][0]
    if merger.awaits_weights and not weight.is_meta:  # patched on the meta device: there are no values to start from
        method = merger.method
        fresh = type(method)(method.host, method.config).to(weight)
        method.load_state_dict(fresh.state_dict(), assign=True)
        merger.awaits_weights = False
    merger.method.init_from_host(model, projections)
    merger.mark_untrained()


WEIGHT_HOOKS = (_begin_loading, follow_loaded_weights, _follow_encoder)


def _function_of(hook: Any) -> Any:
    """The function of a hook, which torch or a partial may have wrapped."""
    hook = getattr(hook, "hook", hook)
    return getattr(hook, "func", hook)


def _is_offloaded(model: nn.Module) -> bool:
    return any(hasattr(module, "_hf_hook") for module in model.modules())
