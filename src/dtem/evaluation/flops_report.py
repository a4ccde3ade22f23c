"""`count_flops`: operations, tokens and added parameters at each r."""

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dtem import methods, schedule
from dtem.adapters.attach import as_handle, attach, is_patched
from dtem.errors import DtemError
from dtem.handle import Handle
from dtem.measure import flops
from dtem.models.factory import create_model
from dtem.tables import Report, Table, giga

CONVENTIONS = {
    "macs": "multiply-adds of matrix products and convolutions, as timm prints them",
    "paper": "as in the paper's tables: macs plus the work of biases, LayerNorm, softmax, GELU and sums; for a "
    "Segmenter macs without the attention products of its decoder",
}


@dataclass(frozen=True)
class FlopsRow:
    """Operations of one image at one r."""

    r: str
    plan: list[int]
    """Tokens merged in each block."""
    tokens: int
    """Tokens after the last block."""
    macs: int
    paper: int
    macs_reduction_percent: float
    paper_reduction_percent: float


@dataclass(frozen=True, repr=False)
class FlopsReport(Report):
    """What `count_flops` returns."""

    model: str
    method: str
    image: list[int]
    """Channels, height and width."""
    tokens: int
    """Tokens of an image before any merging."""
    parameters_added: int
    rows: list[FlopsRow]

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        rows = fields.pop("rows")
        return {**fields, "conventions": CONVENTIONS, "rows": rows}

    def parts(self) -> list[Table | str]:
        columns = ("r", "plan", "tokens left", "GFLOPs (MACs)", "GFLOPs (paper)", "fewer MACs", "parameters added")
        rows = [
            (
                row.r,
                short_plan(row.plan),
                str(row.tokens),
                giga(row.macs),
                giga(row.paper),
                f"{row.macs_reduction_percent:.1f} %",
                f"{self.parameters_added:,}",
            )
            for row in self.rows
        ]
        return [Table(f"{self.model}, {self.method}, {self.tokens} tokens", columns, rows)]


def count_flops(
    model: str | nn.Module | Handle,
    r: object = None,
    *,
    method: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    shortcut: bool = False,
    **model_options: Any,
) -> FlopsReport:
    """Count the operations of one image at each r, in two conventions: MACs, and those of the paper's tables.

    The forward runs on tensors without data, so any model takes a second or two. `model` stays as it was.

    Args:
        model: a model's name (built without weights), a model, or a handle, which brings its own method.
        r: one schedule or a list of them (see `dtem.schedule`); default 0, 8 and 16, for a handle its present one.
        method: name of the reduction method; default dtem, or the adapter's.
        adapter: trained adapter: a file, Hub id or shipped name.
        shortcut: in the last block of a class-token model, compute the class token only.
        model_options: what `create_model` takes (``img_size``, ``global_pool``, …), where `model` is a name.

    Examples:
        >>> report = dtem.count_flops("deit_small_patch16_224", r=[0, 8, 16])
        >>> print(report)
    """
    if isinstance(model, str):
        methods.find(method or "dtem")  # an unknown name is refused before anything is built
        # Without data where possible; an adapter has data, and so has its model then.
        with torch.device("meta") if adapter is None else contextlib.nullcontext():
            built = create_model(model, **{**model_options, "pretrained": False})
            return _report(model, attach(built, method, adapter, shortcut=shortcut), r)
    if model_options:
        raise DtemError(
            f"{', '.join(model_options)}: these are for a model given by name, and this one is built already"
        )
    if is_patched(model):
        handle = as_handle(model, method, adapter)
        return _report(handle.host.name, handle, [handle.r] if r is None else r)
    assert isinstance(model, nn.Module)
    handle = attach(model, method, adapter, shortcut=shortcut)
    try:
        return _report(handle.host.name, handle, r)
    finally:
        handle.unpatch()


def _report(name: str, handle: Handle, r: object) -> FlopsReport:
    host = handle.host
    with handle.at(r=0, mode="hard"):
        unmerged = flops.count(handle.model, host.image)
    rows = []
    for spec in schedule.parse_list((0, 8, 16) if r is None else r):
        with handle.at(r=spec, mode="hard"):
            count = flops.count(handle.model, host.image)
            rows.append(
                FlopsRow(
                    r=spec,
                    plan=list(handle.plan),
                    tokens=handle.tokens[-1],
                    macs=count.macs,
                    paper=count.paper,
                    macs_reduction_percent=100 * (1 - count.macs / unmerged.macs),
                    paper_reduction_percent=100 * (1 - count.paper / unmerged.paper),
                )
            )
    return FlopsReport(
        model=name,
        method=handle.method.name,
        image=list(host.image),
        tokens=host.patches + host.prefix,
        parameters_added=sum(parameter.numel() for parameter in handle.method.parameters()),
        rows=rows,
    )


def short_plan(plan: Sequence[int]) -> str:
    """One r per block with repeats folded: ``16 ×11, 7``."""
    runs = [(r, len(list(repeats))) for r, repeats in itertools.groupby(plan)]
    return ", ".join(f"{r} ×{times}" if times > 1 else str(r) for r, times in runs)
