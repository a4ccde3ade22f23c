"""Running variants of a model side by side: eval mode, one function per r, turns, samples of a dataset."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from dtem.data import sources
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.integrations import Merger, as_logits_fn

if TYPE_CHECKING:
    from dtem.data.loader import Batch, Loader

Forward = Callable[[Tensor], Tensor]
"""Images -> logits."""
SAVE_INTERVAL = 15.0
"""Seconds between two saves of outcomes."""
T = TypeVar("T")


@contextlib.contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Eval mode and, where patched, hard merging. Afterwards every mode, and every r, is what it was."""
    training = {module: module.training for model in models for module in model.modules()}
    with contextlib.ExitStack() as stack:
        for model in models:
            model.eval()
            if isinstance(getattr(model, "dtem", None), Merger):
                stack.enter_context(Handle(model).at(mode="hard"))
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


def at_rates(
    handle: Handle, rates: Sequence[object], run: Callable[..., Any] | None = None
) -> dict[str, Callable[..., Any]]:
    """`run` with the patched model at each r, by its text: functions that can be called in any order.

    Every r is checked (and a budget solved) here, once. The handle keeps its own r. `run` is images -> logits by
    default.
    """
    function = as_logits_fn(handle.model) if run is None else run

    def at(schedule: object) -> Callable[..., Any]:
        def run_at(*arguments: Any) -> Any:
            with handle.at(r=schedule):
                return function(*arguments)

        return run_at

    functions = {}
    for rate in rates:
        with handle.at(r=rate):
            functions[str(rate)] = at(handle.merger.schedule)
    return functions


def run_in_turns(
    variants: Mapping[str, Callable[..., Any]],
    loader: "Loader",
    run_batch: Callable[[Callable[..., Any], "Batch"], T],
    pool: Callable[[Sequence[T]], T],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] | None = None,
    limit: int | None = None,
    save: Callable[[dict[str, T]], object] | None = None,
) -> dict[str, T]:
    """Outcomes of every variant on every batch. Each batch is read once; the variant that comes first changes.

    Args:
        variants: by name, in eval mode, on `device` already.
        loader: of the images.
        run_batch: outcomes of one variant on one batch.
        pool: outcomes of several batches as one.
        device: where the images go.
        dtype: autocast to this type; None: the models' own precision.
        progress: called with the number of images after every batch.
        limit: stop after this many images.
        save: called every `SAVE_INTERVAL` seconds with the outcomes so far.
    """
    names, device, saved = list(variants), torch.device(device), time.monotonic()
    parts: dict[str, list[T]] = {name: [] for name in names}
    for turn, batch in enumerate(_batches(loader, limit)):
        # Not around the loop: what the loader makes and keeps must stay usable in training.
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            on_device = batch._replace(images=batch.images.to(device, non_blocking=True))
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                parts[name].append(run_batch(variants[name], on_device))
        if progress is not None:
            progress(len(batch.names))
        if save is not None and time.monotonic() - saved > SAVE_INTERVAL:
            save({name: pool(each) for name, each in parts.items()})
            saved = time.monotonic()
    if not any(parts.values()):
        raise DtemError("there is nothing to evaluate: the data held no image that could be read")
    return {name: pool(each) for name, each in parts.items()}


def _batches(loader: "Loader", limit: int | None) -> "Iterator[Batch]":
    """The batches of one pass, the last cut where the limit falls."""
    left = limit
    for batch in loader.epoch(0):
        if left is not None and len(batch.names) >= left:
            yield type(batch)(batch.images[:left], batch.labels[:left], batch.names[:left])
            return
        yield batch
        left = None if left is None else left - len(batch.names)


def synchronised_time(images: Tensor) -> float:
    """The clock in seconds, once the device of `images` has finished its work."""
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return time.perf_counter()


def images_per_second(turns: Sequence[tuple[int, float]]) -> float:
    """Of timed batches, as images and seconds: all but the first, which warms up."""
    timed = turns[1:] or turns
    return sum(count for count, _ in timed) / max(sum(seconds for _, seconds in timed), 1e-9)


def sample(source: sources.Source, limit: int, seed: int = 0) -> sources.Source:
    """`limit` images of `source`, drawn at random: the first ones would all be of the first classes.

    A stream comes back as it is; whoever reads it takes the first ones.
    """
    if source.length is None or source.length <= limit:
        return source
    drawn = torch.randperm(source.length, generator=torch.Generator().manual_seed(seed))[:limit]
    return sources.Subset(source, drawn.sort().values.tolist())
