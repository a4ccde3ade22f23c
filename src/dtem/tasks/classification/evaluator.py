"""Running classifiers over labelled images.

Decoding an image costs about as much as the forward of a small model, so every batch is read once and all variants run
on it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dtem.data import sources
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.tasks.classification.outcomes import TOP, Outcomes
from dtem.tasks.outcome_files import pool
from dtem.tasks.running import Forward, at_rates, eval_mode, run_in_turns

if TYPE_CHECKING:
    from dtem.data.loader import Batch, Loader


def sweep(handle: Handle, loader: "Loader", rates: Sequence[object]) -> dict[str, Outcomes]:
    """The patched model's outcomes at every r of `rates`, by its text: ``{"0": …, "16": …}``.

    Merging is hard. Afterwards the handle has the r and the mode that it had.
    """
    with eval_mode(handle.model):
        return run_variants(at_rates(handle, rates), loader)


def run_variants(
    variants: Mapping[str, Forward], loader: "Loader", device: torch.device | str = "cpu", **options: Any
) -> dict[str, Outcomes]:
    """Outcomes of every variant, images -> logits, on every labelled image; options as for `run_in_turns`."""
    return run_in_turns(variants, loader, batch_outcomes, pool, device, **options)


def batch_outcomes(forward: Forward, batch: "Batch") -> Outcomes:
    """Labels, highest-scoring classes and cross-entropy of one batch, in float32 on the CPU."""
    logits, labels = forward(batch.images).float(), batch.labels.to("cpu", torch.int64)
    classes = logits.shape[-1]
    if len(outside := ((labels < 0) | (labels >= classes)).nonzero()):
        name, label = batch.names[int(outside[0])], int(labels[outside[0]])
        if label == sources.UNLABELLED:
            raise DtemError(
                f"the image {name!r} has no label, so accuracy means nothing: sort the images into one folder per "
                "class, in the order of the model's classes"
            )
        raise DtemError(
            f"the image {name!r} has label {label}, the model has classes 0 … {classes - 1}: give data and a model of "
            "the same classes"
        )
    loss = F.cross_entropy(logits, labels.to(logits.device), reduction="none")
    best = logits.topk(min(TOP, classes)).indices
    return Outcomes(batch.names, labels, F.pad(best, (0, TOP - best.shape[-1]), value=-1).cpu(), loss.cpu())
