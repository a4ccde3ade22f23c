"""Variants of a model that are evaluated side by side: unmerged, and each method at each r, with their costs."""

import bisect
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dtem import integrations, methods, schedule
from dtem.adapters import storage
from dtem.adapters.locate import locate
from dtem.data import sources
from dtem.data.sources import Source
from dtem.errors import DtemError
from dtem.evaluation import DTYPES
from dtem.handle import Handle, patch
from dtem.integrations.weight_sharing import share
from dtem.measure import flops, token_costs
from dtem.schedule import Schedule
from dtem.tasks.running import at_rates, sample, synchronised_time
from dtem.types import HostSpec

UNMERGED = "unmerged"
REFERENCE = "tome"
"""The method that every other one is compared with."""
AdapterFile = str | os.PathLike[str]
Adapters = AdapterFile | Sequence[AdapterFile] | Mapping[str, AdapterFile]
"""Adapters: files, Hub ids or shipped names, also as ``LABEL=FILE``; or a mapping from label to file."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """How variants are run, whatever the task."""

    batch_size: int | None = None
    """None: that of the task."""
    workers: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    limit: int | None = None
    out: Path | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("workers", 0), ("limit", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DtemError(f"{name} = {value} must be {least} or more")
        check_device(self.device, self.dtype)
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DtemError(f"out = {str(self.out)!r} cannot be made a folder: {error.strerror}") from error

    @property
    def autocast(self) -> torch.dtype | None:
        """The type to autocast to; None: the models' own precision."""
        return None if self.dtype == DTYPES[0] else getattr(torch, self.dtype)


def check_device(device: str, dtype: str = "float32") -> None:
    """Refuse an unknown dtype, and CUDA where there is none."""
    if dtype not in DTYPES:
        raise DtemError(f"dtype = {dtype!r} is not known; choose one of: {', '.join(DTYPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise DtemError("device = 'cuda': torch sees no CUDA device here; use device = 'cpu'")


class PatchedModel(NamedTuple):
    """A patched model under its label, and the schedules that it is run at."""

    label: str
    handle: Handle
    specs: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and its patched copies, the data, and how they are run."""

    model: nn.Module
    """Unmerged."""
    source: str | Source
    settings: RunSettings
    name: str
    """The model's, in the report."""
    handle: Handle | None = None
    """Of a patched copy, where the user's model is patched."""
    patched: Sequence[PatchedModel] = ()
    trained_on: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Names of the training images, by label."""

    def at(self, specs: Sequence[str], handles: Mapping[str, Handle], trained_on: Mapping[str, Sequence[str]]) -> Self:
        """With the handles of `patched_variants`, all at the same schedules."""
        patched = [PatchedModel(label, handle, specs) for label, handle in handles.items()]
        return dataclasses.replace(self, patched=patched, trained_on=trained_on)

    @property
    def models(self) -> list[nn.Module]:
        """The unmerged model, then the patched ones."""
        return [self.model, *(entry.handle.model for entry in self.patched)]

    def select(self, source: Source) -> tuple[Source, int]:
        """`source` without training images, and at most `limit` of the rest; and the number of images left out."""
        selected, left_out = sources.without(source, {name for names in self.trained_on.values() for name in names})
        limit = self.settings.limit
        return (selected if limit is None else sample(selected, limit)), left_out


class TimedForward:
    """A forward that records its time and, with `traced`, the tokens of each image after every block."""

    def __init__(self, forward: Callable[..., Any], traced: Handle | None = None) -> None:
        self.forward = forward
        self.traced = traced
        self.turns: list[tuple[int, float]] = []
        """Images and seconds of each batch."""
        self.tokens: list[Tensor] = []

    def __call__(self, images: Tensor, *more: Any) -> Any:
        start = synchronised_time(images)
        with contextlib.nullcontext() if self.traced is None else self.traced.trace() as trace:
            output = self.forward(images, *more)
        self.turns.append((len(images), synchronised_time(images) - start))
        if trace is not None:
            self.tokens.append(token_costs.tokens_per_block(trace))
        return output


class TokenCosts(NamedTuple):
    """What tokens cost (`measure.token_costs`), in both conventions."""

    host: HostSpec
    macs: Tensor
    paper: Tensor


@dataclasses.dataclass(frozen=True)
class Variant:
    """One method at one r, with its cost."""

    label: str
    r: str
    tokens: float
    """Tokens after the last block."""
    macs: int
    paper: int
    """Operations as the paper counts them."""
    forward: TimedForward
    costs: TokenCosts | None = None
    """Where the cost differs from image to image: what it is computed from once the images have been run."""
    macs_quartiles: tuple[int, int] | None = None
    """There, the quartiles of MACs over images."""

    @property
    def name(self) -> str:
        """Label and r, fit for a file name."""
        return UNMERGED if self.label == UNMERGED else file_name(self.label, self.r)


def file_name(label: str, r: str) -> str:
    """Name of the file of one method at one r."""
    return re.sub(r"[^\w.@%+-]", "_", f"{label}-r{r}")


def with_measured_cost(variant: Variant) -> Variant:
    """The variant with its cost over the images that were run, where each image has its own."""
    costs = variant.costs
    if costs is None:
        return variant
    tokens = torch.cat(variant.forward.tokens)
    macs, paper = (token_costs.macs_at(each, tokens, costs.host) for each in (costs.macs, costs.paper))
    low, high = macs.quantile(macs.new_tensor([0.25, 0.75])).tolist()
    return dataclasses.replace(
        variant,
        tokens=round(tokens[:, -1].double().mean().item(), 1),
        macs=round(macs.mean().item()),
        paper=round(paper.mean().item()),
        macs_quartiles=(round(low), round(high)),
    )


def fit_costs(label: str, handle: Handle) -> TokenCosts:
    """What tokens cost this model."""
    if handle.merger.shortcut:
        raise DtemError(f"{label} has a cost per image, which is counted without the shortcut; leave it out")

    @functools.cache
    def count(plan: tuple[int, ...]) -> flops.Count:
        with handle.at(r=list(plan)):
            return flops.count(handle.model, handle.host.image)

    macs = token_costs.fit_token_costs(lambda plan: count(plan).macs / 1e9, handle.host)
    paper = token_costs.fit_token_costs(lambda plan: count(plan).paper / 1e9, handle.host)
    return TokenCosts(handle.host, macs, paper)


def solve_budget(handle: Handle, spec: str, batches: Sequence[Tensor] | None = None) -> Schedule:
    """The schedule of `spec`. A budget that is met on average only is solved on the images of `batches`."""
    plans, parsed = handle.method.candidate_plans(), schedule.parse(spec)
    if plans is None or batches is None or not isinstance(parsed, schedule.Budget):
        with handle.at(r=spec):
            return handle.merger.schedule
    costs = fit_costs(handle.method.name, handle)

    @functools.cache
    def cost(step: int) -> float:
        with handle.at(r=plans[step]):
            tokens = token_costs.measure_tokens(handle.model, batches)
        return token_costs.macs_at(costs.macs, tokens, handle.host).mean().item() / 1e9

    step = bisect.bisect_left(range(len(plans) - 1), True, key=lambda step: cost(step) <= parsed.gflops)
    if cost(step) > parsed.gflops:
        raise DtemError(f"a budget of {parsed} cannot be met by {handle.method.name}: at least {cost(step):.3g} GFLOPs")
    if step and cost(step - 1) - parsed.gflops < parsed.gflops - cost(step):  # on average, so the nearer one
        step -= 1
    with handle.at(r=plans[step]):
        return handle.merger.schedule


def variants_of(
    model: nn.Module,
    patched: Sequence[PatchedModel],
    image: tuple[int, int, int] | None = None,
    batches: Sequence[Tensor] | None = None,
    function_of: Callable[[nn.Module], Callable[..., Any]] = integrations.as_logits_fn,
) -> list[Variant]:
    """The unmerged model, and every patched one at each r that it supports and that merges something.

    Args:
        model: the unmerged model.
        patched: its patched copies.
        image: shape of the image that operations are counted for; None: the model's input.
        batches: images for `solve_budget`, and the cost is that of the images run, where each has its own.
        function_of: what is run with a model; images -> logits by default.
    """
    host = integrations.find(model).describe(model)
    count = flops.count(model, image or host.image)
    forward = TimedForward(function_of(model))
    variants = [Variant(UNMERGED, "0", host.patches + host.prefix, count.macs, count.paper, forward)]
    for label, handle, specs in patched:
        function = function_of(handle.model)
        for spec in specs:
            if spec == "learned" and handle.method.schedule() is None:
                continue
            solved = solve_budget(handle, spec, batches)
            with handle.at(r=solved):
                if not handle.merger.active:
                    continue
                (run,) = at_rates(handle, [solved], function).values()
                if batches is not None and handle.method.variable_length:
                    timed = TimedForward(run, handle)
                    variants.append(Variant(label, spec, 0, 0, 0, timed, fit_costs(label, handle)))
                else:
                    count = flops.count(handle.model, image or handle.host.image)
                    variants.append(Variant(label, spec, handle.tokens[-1], count.macs, count.paper, TimedForward(run)))
    return variants


def patched_variants(
    model: nn.Module,
    methods: Sequence[str],
    adapters: Adapters = (),
    handle: Handle | None = None,
    shortcut: bool = False,
    keep_listed: bool = False,
) -> tuple[dict[str, Handle], dict[str, list[str]]]:
    """Patched copies of `model` by label, and the files that each was trained on. They share the model's weights.

    An adapter takes the place of its untrained method, and so does `handle`, a patched model of the user's own.
    """
    trained: dict[str, Handle] = {} if handle is None else {handle.method.name: handle}
    listed: dict[str, list[str]] = {}
    for file_label, name in labelled(adapters):
        path = locate(name)
        adapted = storage.from_pretrained(path, share(model), r=0, shortcut=shortcut)
        label = file_label or adapted.method.name
        if label in trained or label == UNMERGED:
            raise DtemError(f"adapter {name}: {label!r} is taken; give each adapter its own label, LABEL=FILE")
        trained[label] = adapted
        listed[label] = [] if keep_listed else storage.trained_on(storage.read(path)[0])
    trained_methods = {each.method.name for each in trained.values()}
    handles: dict[str, Handle] = {}
    for method in methods:
        if method in trained and method not in trained_methods:
            raise DtemError(f"{method!r} is a method and the label of an adapter; call the adapter something else")
        if method not in trained_methods:
            handles[method] = patch(share(model), method, shortcut=shortcut)
    return {**handles, **trained}, listed


def check_methods(names: str | Sequence[str], dense: bool = False) -> list[str]:
    """Names of methods, from text with commas or a list, each once; an unknown one is refused."""
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    for name in parts:
        methods.find(name, dense)
    return list(dict.fromkeys(parts))


def labelled(adapters: Adapters) -> list[tuple[str | None, str]]:
    """Label, if one is given, and file of each adapter."""
    if isinstance(adapters, Mapping):
        return [(label, os.fspath(name)) for label, name in adapters.items()]
    names = [adapters] if isinstance(adapters, str | os.PathLike) else adapters
    return [split_label(os.fspath(name)) for name in names]


def split_label(text: str) -> tuple[str | None, str]:
    """``label=FILE`` in its two parts; a file whose name has an equals sign is just that."""
    label, equals, name = text.partition("=")
    if not equals or Path(text).exists():
        return None, text
    if not re.fullmatch(r"[\w.+-]+", label) or not name:
        raise DtemError(f"adapter {text!r}: write LABEL=FILE, with letters, digits and . _ + - in the label")
    return label, name
