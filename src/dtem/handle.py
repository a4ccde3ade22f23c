"""`dtem.patch` and the handle that it returns."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from dtem import adapters, methods
from dtem import schedule as schedules
from dtem.adapters import Merger, Trace
from dtem.measure import flops
from dtem.methods import Method
from dtem.types import DtemError, HostSpec


def patch(model: nn.Module, method: str = "dtem", r: object = 0, *, shortcut: bool = False, **options: Any) -> "Handle":
    """Make `model` merge tokens, in place. Returns the handle that steers it.

    Args:
        model: a supported host, e.g. ``timm.create_model("deit_small_patch16_224")``.
        method: name of the reduction method; untrained, ``"dtem"`` is exactly ``"tome"``.
        r: tokens removed per block: ``16``, or any other schedule of `dtem.schedule`.
        shortcut: in the last block of a class-token model, compute the class token only. Exact up to rounding.
        options: the method's own settings, see its config class.

    Example:
        >>> handle = dtem.patch(model, r=16)
        >>> handle.r = 8
        >>> handle.unpatch()
    """
    if isinstance(getattr(model, "dtem", None), Merger):
        raise DtemError(
            f"{type(model).__name__} is patched already; use dtem.Handle(model) to steer it, or unpatch it first"
        )
    adapter = adapters.find(model)
    host = adapter.describe(model)
    cls = methods.find(method, host.dense)
    missing = cls.needs - adapter.provides - host.provides
    if missing:
        listed = ", ".join(sorted(missing))
        raise DtemError(f"method {method!r} needs {listed}, which {host.name} ({adapter.family}) does not provide")
    if shortcut and not adapter.shortcuts:
        raise DtemError(f"shortcut=True is not available for {host.name} ({adapter.family}); leave it out")
    asked = schedules.parse(r)
    schedules.check(asked, host.patches, host.depth)
    built = cls.create(host, options)
    projections = adapter.key_projections(model)
    like = projections[0][0]
    built.to_empty(device="meta") if like.is_meta else built.to(like)
    built.start(projections)
    built.train(model.training)
    adapter.attach(model, Merger(built, schedules.Constant(0), adapter.family, shortcut))
    handle = Handle(model)
    try:
        handle.r = r
    except DtemError:
        handle.unpatch()
        raise
    return handle


class Handle:
    """Steers a patched model. Holds nothing itself: any patched model (a copy, an unpickled one) takes a new handle."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.merger  # noqa: B018 - refuses a model that is not patched

    @property
    def merger(self) -> Merger:
        merger = getattr(self.model, "dtem", None)
        if not isinstance(merger, Merger):
            raise DtemError(f"{type(self.model).__name__} is not patched (any more); call dtem.patch(model) first")
        return merger

    @property
    def method(self) -> Method:
        """The method object, with its trained parts."""
        return self.merger.method

    @property
    def host(self) -> HostSpec:
        """What is known of the model."""
        return self.method.host

    @property
    def r(self) -> object:
        """The schedule as it was given. Set it at any time."""
        return self.merger.asked

    @r.setter
    def r(self, spec: object) -> None:
        asked = schedules.at_front(schedules.parse(spec), self.host.merging)
        schedules.check(asked, self.host.patches, self.host.depth, self.method.stages)
        if isinstance(asked, schedules.Budget):
            asked = self._solve(asked)
        elif isinstance(asked, schedules.Learned):
            asked = self._learned()
        self.merger.schedule = asked
        self.merger.asked = spec

    def _learned(self) -> schedules.Schedule:
        """As it stands now: set ``handle.r = "learned"`` again after more training."""
        learned = self.method.schedule()
        if learned is None:
            raise DtemError(f"r = 'learned', and method {self.method.name!r} learns no schedule; give a number")
        return schedules.PerLayer(learned)

    def aim(self, r: object) -> None:
        """Get ready to learn rates that start from the schedule `r`, usually a budget, and cost what it costs.

        Soft steps then run at what ``handle.r`` is afterwards; if that is ``"learned"``, set it before every one.

        Example:
            >>> handle = dtem.patch(model, learn_rates=True)
            >>> handle.aim("0.65G")
        """
        if self.method.schedule() is None:
            raise DtemError(f"method {self.method.name!r} learns no rates; use diffrate, or dtem with learn_rates=True")
        if self.merger.shortcut:
            raise DtemError(
                "rates are learned without the shortcut, which makes the last block unlike the others: "
                "leave shortcut=True to dtem.from_pretrained"
            )
        self.r = r
        if not any(plan := self.plan):
            raise DtemError(f"r = {r} leaves no rates to learn: it merges nothing")
        with self._counting() as cost:
            trained_at = self.method.aim(plan, cost)
        self.r = trained_at

    def _solve(self, budget: schedules.Budget) -> schedules.Schedule:
        with self._counting() as cost:
            return budget.solve(self.host.patches, self.host.depth, cost, self._stages, self.method.afresh)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[Callable[[tuple[int, ...]], float]]:
        """GFLOPs by plan. What counts is inference: hard merging, whatever the mode is now."""
        schedule, soft = self.merger.schedule, self.method.soft
        self.method.soft = False
        try:
            yield self._gflops
        finally:
            self.merger.schedule, self.method.soft = schedule, soft

    @property
    def _stages(self) -> Collection[int] | None:
        """The blocks that a budget may be met in; None: all."""
        stages, front = self.method.stages, self.host.merging
        if front is None:
            return stages
        return [layer for layer in (range(front) if stages is None else stages) if layer < front]

    def _gflops(self, plan: tuple[int, ...]) -> float:
        self.merger.schedule = schedules.PerLayer(plan)
        return flops.count(self.model, self.host.image).macs / 1e9

    @property
    def plan(self) -> tuple[int, ...]:
        """r of every block at the host's own image size, after clamping."""
        return self.merger.plan(self.host.patches)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens after every block at the host's own image size (all of them, if the method brings them back)."""
        plan = [0] * self.host.depth if self.method.restores else self.plan
        return schedules.tokens(plan, self.host.patches, self.host.prefix)

    @property
    def mode(self) -> str:
        """``"hard"`` (inference) or ``"soft"`` (differentiable, for training)."""
        return "soft" if self.method.soft else "hard"

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in ("hard", "soft"):
            raise DtemError(f"mode = {mode!r} is not known; choose 'hard' or 'soft'")
        if mode == "soft" and not self.method.can_relax():
            raise DtemError(f"method {self.method.name!r} has no soft mode")
        if mode == "soft" and self.host.pooling in ("max", "avgmax"):
            raise DtemError(f"{self.host.pooling} pooling has no soft mode: it sees tokens that merging would remove")
        self.method.soft = mode == "soft"

    def trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Record which patches end up in which token.

        Example:
            >>> with handle.trace() as trace:
            ...     model(images)
            >>> trace.sources[-1]      # (batch, patches): the token that holds each patch after the last block
        """
        return adapters.tracing()

    def unpatch(self) -> nn.Module:
        """Make the model what it was before `patch`, and return it."""
        adapters.load(self.merger.family).detach(self.model)
        return self.model

    def __repr__(self) -> str:
        if not isinstance(getattr(self.model, "dtem", None), Merger):
            return f"Handle({type(self.model).__name__}, not patched)"
        return f"Handle({self.host.name}, method={self.method.name!r}, r={self.r}, mode={self.mode!r})"
