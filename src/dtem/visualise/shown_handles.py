"""The handles that `dtem.show` compares: given ones, or copies of a model patched with each method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dtem import integrations, schedule
from dtem.adapters.attach import is_patched
from dtem.adapters.locate import shipped_for
from dtem.data.labels import Labels
from dtem.errors import DtemError
from dtem.evaluation.variants import Adapters, check_methods, labelled, patched_variants
from dtem.handle import Handle
from dtem.models.factory import create_model
from dtem.models.segmenter import PRESETS as SEGMENTERS
from dtem.tasks.segmentation.classes import named_classes

DEFAULT_METHODS, DEFAULT_R = ("tome", "dtem"), 16
UNTRAINED = "dtem is untrained here, so it merges exactly as tome does: give a trained adapter"


def find_handles(
    model: str | nn.Module | Handle | Mapping[str, Handle],
    labels: Labels | None,
    methods: str | Sequence[str],
    adapters: Adapters,
    r: object,
    shortcut: bool,
    model_options: dict[str, Any],
) -> tuple[dict[str, Handle], tuple[str, ...], tuple[str, ...]]:
    """Handles by name, file names of their adapters, and notes."""
    if model_options and not isinstance(model, str):
        raise DtemError(
            f"{', '.join(model_options)}: these are for a model given by name, and this one is built already"
        )
    if isinstance(model, Mapping | Handle) or (isinstance(model, nn.Module) and is_patched(model)):
        if adapters or tuple(check_methods(methods)) != DEFAULT_METHODS:
            raise DtemError("the model is patched already: leave methods and adapters out, or give the unpatched model")
        return as_handles(model), (), ()
    if r is not None:
        schedule.parse(r)
    shipped = None
    if isinstance(model, str):
        dense = model in SEGMENTERS
        check_methods(methods, dense)
        if dense and labels is not None and model_options.get("num_classes") is None:
            model_options = {**model_options, "num_classes": len(named_classes(labels) or ())}
        shipped = shipped_for(model)
        model = create_model(model, **model_options)
    names = check_methods(methods, dense=integrations.find(model).describe(model).dense)
    if "dtem" in names and not adapters and shipped is not None:
        adapters = [shipped]
    handles, _ = patched_variants(model, names, adapters, shortcut=shortcut)
    for handle in handles.values():
        handle.r = DEFAULT_R if r is None else r
    files = tuple(sorted(Path(file).name for _, file in labelled(adapters)))
    return handles, files, (UNTRAINED,) if "dtem" in handles and not files else ()


def as_handles(model: Handle | nn.Module | Mapping[str, Handle]) -> dict[str, Handle]:
    """Handles of one model by name; a single one has the name of its method."""
    if isinstance(model, nn.Module):
        model = Handle(model)
    handles = {model.method.name: model} if isinstance(model, Handle) else dict(model)
    if not handles:
        raise DtemError("there is nothing to show: give a handle, or several by name")
    first = next(iter(handles.values()))
    for name, handle in handles.items():
        if handle.host != first.host:
            raise DtemError(f"{name} is of {handle.host.name}, not of {first.host.name}: compare methods on one model")
    return handles
