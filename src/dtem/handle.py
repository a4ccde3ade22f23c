"""`dtem.patch` and the handle that it returns."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtem import adapters, methods
from dtem import schedule as schedules
from dtem.adapters import Merger, Trace
from dtem.measure import flops, thresholds
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
    if adapter.methods is not None and cls.name not in adapter.methods:
        raise DtemError(
            f"method {method!r} reads features of tokens in its own way, and those of {host.name} ({adapter.family}) "
            f"hold their places too; choose one of: {', '.join(sorted(adapter.methods))}"
        )
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
        asked = schedules.parse(spec)
        if isinstance(asked, schedules.Adaptive):
            asked = self._calibrated()
        if isinstance(asked, schedules.Threshold) and not self.method.adaptive:
            raise DtemError(
                f"r = {spec}: method {self.method.name!r} does not merge by edges, so there is nothing to compare "
                "with a threshold; thresholds are for dtem, tome and their kin"
            )
        asked = schedules.at_front(asked, self.host.merging)
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

    def _calibrated(self) -> schedules.Threshold:
        if self.merger.adaptive is None:
            raise DtemError("r = 'adaptive', and nothing is calibrated: handle.calibrate(images, '0.65G') does that")
        return self.merger.adaptive

    def calibrate(self, images: Tensor | Iterable[Tensor], budget: str, batch: int = 1) -> float:
        """Find thresholds at which images cost `budget` on average, and merge by them (``r = "adaptive"``).

        Every image then merges as much as its similarities allow. `images` need no labels: one tensor, taken `batch` at
        a time, or batches. Returns the mean GFLOPs (MACs) of these images. `dtem.save` keeps the thresholds.

        Example:
            >>> handle.calibrate(images, "0.65G")
        """
        asked = schedules.parse(budget)
        if not isinstance(asked, schedules.Budget):
            raise DtemError(f"budget = {budget!r} must be one of GFLOPs, such as 0.65G")
        if self.model.training or self.method.soft:
            raise DtemError("thresholds are calibrated as the model will run: model.eval() and handle.mode = 'hard'")
        if self.merger.shortcut:
            raise DtemError("costs are counted image by image, which goes without the shortcut: patch without it")
        batches = torch.split(images, batch) if isinstance(images, Tensor) else images
        batches = batches if isinstance(batches, Sequence) else list(batches)
        before = self.merger.schedule, self.merger.asked
        self.r = schedules.Threshold((0.0,) * self.host.depth)  # refused here, if the method has no thresholds
        try:
            start = self._solve(asked)
            with self._counting() as cost:
                found = thresholds.calibrate(self.model, self.merger, batches, asked.gflops, start, cost)
        finally:
            self.merger.schedule, self.merger.asked = before
        self.merger.adaptive, gflops = found
        self.r = "adaptive"
        return gflops

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

    def _solve(self, budget: schedules.Budget) -> schedules.PerLayer:
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
        plan = self.merger.plan(self.host.patches)
        if not all(isinstance(r, int) for r in plan):
            raise DtemError(
                f"r = {self.r} merges what each image allows, so there is no plan for all: `dtem eval` counts what it "
                "comes to, and handle.trace() shows it"
            )
        return tuple(r for r in plan if isinstance(r, int))

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
