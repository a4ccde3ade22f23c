"""What every host family shares: the walk through one block, and what hangs onto a patched model."""

import contextlib
import contextvars
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from dtem import ops
from dtem import schedule as schedules
from dtem.methods import Method
from dtem.types import Above, HostSpec, Taps, Tokens

Attention = Callable[[Tensor, Tensor | None], tuple[Tensor, Taps]]
"""x and bias by key -> x with the attention residual added, and the taps."""
Mlp = Callable[[Tensor], Tensor]
"""x -> x with the MLP residual added."""


class Merger(nn.Module):
    """The only thing added to a patched model (as its submodule `dtem`): the method and its settings."""

    def __init__(self, method: Method, schedule: schedules.Schedule, family: str, shortcut: bool = False) -> None:
        super().__init__()
        self.method = method
        self.schedule = schedule
        self.asked: object = schedule
        """The schedule as the user wrote it (a budget stays readable after it was solved)."""
        self.adaptive: schedules.Threshold | None = None
        """Thresholds that were calibrated (``r = "adaptive"``)."""
        self.family = family
        self.shortcut = shortcut

    @property
    def active(self) -> bool:
        """Whether anything would be merged at all; if not, the host's own forward runs."""
        return any(self.schedule.wanted(self.method.host.depth))

    def plan(self, patches: int) -> tuple[int | Above, ...]:
        """r of every block for an image of `patches` patches."""
        resolve = schedules.resolve if torch.compiler.is_compiling() else _resolve_once
        return resolve(self.schedule, patches, self.method.host.depth, self.method.afresh)


_resolve_once = functools.lru_cache(maxsize=1024)(schedules.resolve)


class Adapter(ABC):
    """How to speak to one family of hosts."""

    family: ClassVar[str]
    provides: ClassVar[frozenset[str]]
    """Taps that methods may ask for."""
    supported: ClassVar[str]
    """For messages: what this adapter takes."""
    methods: ClassVar[frozenset[str] | None] = None
    """The methods that it can take; None: all whose needs it meets."""
    shortcuts: ClassVar[bool] = False
    """Whether it can compute the class token only in the last block."""

    @abstractmethod
    def refusal(self, model: nn.Module) -> str | None:
        """None: I take it. A text: it is of my family, but this is in the way. Empty: not of my family."""

    @abstractmethod
    def describe(self, model: nn.Module) -> HostSpec:
        """What methods need to know of the host."""

    @abstractmethod
    def key_projections(self, model: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
        """Per block, the head-mean of the key projection: weight (e, c) and bias (e)."""

    @abstractmethod
    def attach(self, model: nn.Module, merger: Merger) -> None:
        """Make `model` merge."""

    @abstractmethod
    def detach(self, model: nn.Module) -> None:
        """Make `model` what it was."""


def run_block(method: Method, layer: int, tokens: Tokens, r: int | Above, attention: Attention, mlp: Mlp) -> Tokens:
    """One block: the four steps of `methods.base`."""
    r = cast(int, r)  # thresholds reach methods that take them only: a handle sees to it
    tokens = method.before(layer, tokens, r)
    x, taps = attention(tokens.x, method.bias(tokens))
    tokens = method.reduce(layer, tokens.replace(x=x), taps, r)
    tokens = tokens.replace(x=mlp(tokens.x))
    return method.after(layer, tokens, r)


def walk(
    merger: Merger,
    x: Tensor,
    layers: Iterable[Any],
    halves: Callable[[Any], tuple[Attention, Mlp]],
    again: bool = False,
    seen: Callable[[Tokens], None] | None = None,
) -> Tokens:
    """Tokens through `layers` (of all, the first ones), merging on the way.

    Args:
        merger: what hangs onto the model.
        x: all tokens, prefix first.
        layers: the host's.
        halves: of a layer, what `run_block` calls.
        again: compute every layer again in the backward pass (gradient checkpointing).
        seen: called with the tokens after every layer; they then have their source map.
    """
    method, prefix = merger.method, merger.method.host.prefix
    patches = x.shape[1] - prefix
    trace = current_trace()
    source = None
    if (trace is not None or seen is not None) and not method.soft:
        source = torch.arange(prefix, prefix + patches, device=x.device).expand(x.shape[0], -1)
    tokens = Tokens(x, source=source)
    for index, (layer, r) in enumerate(zip(layers, merger.plan(patches), strict=False)):
        attention, mlp = halves(layer)
        step = functools.partial(run_block, method, index, r=r, attention=attention, mlp=mlp)
        tokens = checkpointed(step, tokens) if again and torch.is_grad_enabled() else step(tokens)
        if trace is not None:
            trace.record(tokens)
        if seen is not None:
            seen(tokens)
    return tokens


@dataclasses.dataclass
class Trace:
    """What was merged, block by block, in every forward made under `handle.trace()`."""

    sources: list[Tensor] = dataclasses.field(default_factory=list)
    """After each block: for each patch (row by row), the index of the token that holds it, −1 if dropped. (b, p)"""
    sizes: list[Tensor] = dataclasses.field(default_factory=list)
    """After each block: patches that each token stands for. (b, n)"""

    def record(self, tokens: Tokens) -> None:
        if tokens.source is not None:
            self.sources.append(tokens.source)
        size = tokens.size
        self.sizes.append(torch.ones_like(tokens.x[..., 0]) if size is None else size.detach())


_trace: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("dtem_trace", default=None)


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Record the forwards of this thread."""
    trace = Trace()
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)


def current_trace() -> Trace | None:
    """The trace being recorded, if any (never inside a compiled graph)."""
    return None if torch.compiler.is_compiling() else _trace.get()


class Auxiliary(dict[str, Tensor]):
    """What a method says of a soft forward beside its outcome: losses by name, to be added to the task's."""

    offers: tuple[ops.Offer, ...] = ()
    """Merges to be priced: their cost is the loss."""


_losses: contextvars.ContextVar[Auxiliary | None] = contextvars.ContextVar("dtem_losses", default=None)


@contextlib.contextmanager
def auxiliary() -> Iterator[Auxiliary]:
    """Collect what the method has to say of the soft forward that this thread makes inside."""
    found = Auxiliary()
    token = _losses.set(found)
    try:
        yield found
    finally:
        _losses.reset(token)


def finish(method: Method, tokens: Tokens) -> None:
    """The walk is done: hand what the method says to whoever collects it (nobody does in a compiled graph)."""
    found = None if torch.compiler.is_compiling() else _losses.get()
    if found is not None and method.soft:
        found.update(method.losses(tokens))
        found.offers += method.offers(tokens)


def checkpointed(run: Callable[..., Any], *args: Any) -> Any:
    """Gradient checkpointing that lets gradients through token sizes as well as features."""
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
