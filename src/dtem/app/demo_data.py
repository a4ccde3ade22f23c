"""Images of the demo: to train on and to compare on, with labels or, without any, the unmerged model's own answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import nn

from dtem.data import sources
from dtem.data.labels import class_labels, num_classes
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.sources import Record, Source, Subset
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.integrations import as_logits_fn
from dtem.progress import progress_bar
from dtem.tasks.running import eval_mode, sample

Measure = Literal["accuracy", "agreement"]
"""Of the predictions with the labels, or with those of the unmerged model."""


@dataclass(frozen=True)
class DemoData:
    """What a demo trains on and compares on."""

    training: Source
    held_out: Source
    """Labelled; by the unmerged model where `measure` is ``agreement``."""
    measure: Measure
    class_names: Sequence[str] | None
    """Name of each class; None: not known."""
    mask: Callable[[str], Bool[ndarray, "h w"]] | None = None
    """By the name of a held-out image: where its object is; None: not known."""
    note: str = ""
    """Why the labels are not used, where there are some."""


class Relabelled(Source):
    """The images of a source that is read by index, under other labels or, without `labels`, under none."""

    def __init__(self, source: Source, labels: Sequence[int] | None, spec: str) -> None:
        super().__init__(spec, labelled=labels is not None, length=source.length)
        self.source = source
        self._labels = [sources.UNLABELLED] * (source.length or 0) if labels is None else labels

    def read(self, index: int) -> Record:
        return self.source.read(index)._replace(label=self._labels[index])

    @property
    def names(self) -> Sequence[str] | None:
        return self.source.names

    @property
    def labels(self) -> Sequence[int]:
        return self._labels

    def name(self, index: int) -> str:
        return self.source.name(index)


def own_data(
    model: nn.Module, data: str | Source, eval_data: str | Source | None, limit: int, seed: int, batch_size: int
) -> DemoData:
    """Images of the user's own. Without `eval_data`, a fifth of `data` drawn at random is compared on.

    Labels count where the data has them and its classes are those of the model.
    """
    training = sources.open_source(data) if isinstance(data, str) else data
    held_out = sources.open_source(eval_data) if isinstance(eval_data, str) else eval_data
    if held_out is None:
        if training.length is None or training.length < 10:
            raise DtemError(f"{training.spec} cannot be split ({training.length or 'a stream'}); give eval_data too")
        order = torch.randperm(training.length, generator=torch.Generator().manual_seed(seed))
        fifth, rest = order.tensor_split([training.length // 5])
        held_out = Subset(training, fifth.sort().values.tolist())
        training = Subset(training, rest.sort().values.tolist())
    if held_out.length is None:
        raise DtemError(f"{held_out.spec} is a stream: compare on images that are read by index, e.g. of a folder")
    held_out = sample(held_out, limit)
    count = num_classes(model)
    if count == 0:
        raise DtemError("the model has no classes: it gives features, and the demo compares predictions")
    names = _class_folders(held_out)
    note = ""
    if names is not None and count is not None and len(names) != count:
        note = f"labels not used: {len(names)} class folders, and the model has {count} classes"
    if held_out.labelled and not note:
        return DemoData(training, held_out, "accuracy", names or class_labels(model))
    if note and training.length is not None:
        training = Relabelled(training, None, training.spec)
    labels = predicted_classes(model, held_out, batch_size)
    spec = f"{held_out.spec} (labels: the unmerged model's predictions)"
    return DemoData(training, Relabelled(held_out, labels, spec), "agreement", class_labels(model), note=note)


@torch.inference_mode()
def predicted_classes(model: nn.Module, source: Source, batch_size: int) -> list[int]:
    """The class that `model` predicts for every image; 0 for one that cannot be read, which no evaluation uses."""
    loader = Loader(source, eval_transform(resolve_data_config(model)), batch_size)
    found: dict[str, int] = {}
    with eval_mode(model), progress_bar(source.length, "unmerged model") as advance:
        for batch in loader.epoch(0):
            found |= zip(batch.names, as_logits_fn(model)(batch.images).argmax(1).tolist(), strict=True)
            advance(len(batch.names))
    return [found.get(source.name(index), 0) for index in range(source.length or 0)]


def _class_folders(source: Source) -> list[str] | None:
    """Names of the class folders in their order; None where there are none, or where their names are the labels."""
    while isinstance(source, Subset):
        source = source.source
    if not isinstance(source, sources.Folder) or not source.labelled:
        return None
    names = sorted({PurePosixPath(name).parts[0] for name in source.names})
    return None if all(name.isascii() and name.isdecimal() for name in names) else names
