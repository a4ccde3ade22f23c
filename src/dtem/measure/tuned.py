"""Plans by measured time: the least merging that reaches a time here, and the plan that `dtem.tune` chose."""

import dataclasses
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from dtem._version import __version__
from dtem.errors import DtemError
from dtem.integrations import Merger
from dtem.measure import costs
from dtem.schedule import Latency, PerLayer


@dataclasses.dataclass(frozen=True)
class TunedPlan:
    """A plan that was tuned, and for what; adapter files keep it."""

    plan: tuple[int, ...]
    target: str
    batch: int
    engine: str
    dtype: str
    threads: int
    machine: str
    milliseconds: float
    """Of one forward of the batch, as measured."""
    speedup: float
    divergence: float
    """From the unmerged model on the photographs that it was tuned on."""

    def to_dict(self) -> dict[str, Any]:
        """For the header of an adapter file."""
        return {**dataclasses.asdict(self), "plan": list(self.plan)}

    @classmethod
    def from_dict(cls, values: Any, depth: int) -> "TunedPlan":
        """Read from a header; refused if it is none."""
        kinds = {"plan": list, "target": str, "batch": int, "engine": str, "dtype": str, "threads": int}
        kinds |= {"machine": str, "milliseconds": float, "speedup": float, "divergence": float}
        right = isinstance(values, dict) and values.keys() == kinds.keys()
        right = right and all(type(values[name]) is kind for name, kind in kinds.items())
        if not right or len(values["plan"]) != depth or any(type(r) is not int or r < 0 for r in values["plan"]):
            raise DtemError("the tuned plan in the header is damaged. Copy or download the file again, or tune again")
        return cls(**{**values, "plan": tuple(values["plan"])})


def cost_key(model: nn.Module, batch: int = 1, engine: str = "eager", dtype: str | None = None) -> costs.CostKey:
    """What the cost table of a patched model on this machine is named by."""
    merger, weight = _merger(model), next(model.parameters())
    host = merger.method.host
    return costs.CostKey(
        host=host.name.rpartition("/")[2],
        image=host.image,
        method=merger.method.name,
        shortcut=host.pooling == "prefix" and (merger.shortcut or engine != "eager"),
        batch=batch,
        dtype=dtype or str(weight.dtype).removeprefix("torch."),
        engine=engine,
        threads=torch.get_num_threads(),
        cpu=costs.cpu_name(),
        torch=torch.__version__,
        dtem=__version__,
    )


def solve_latency(model: nn.Module, target: Latency, stages: Collection[int] | None) -> PerLayer:
    """The least merging that reaches `target` by the measured costs of a patched model; `stages` may merge."""
    key, method = cost_key(model, target.batch), _merger(model).method
    table, host = costs.load(key), method.host
    if table is None:
        batch = f" --batch-size {target.batch}" if target.batch != 1 else ""
        raise DtemError(
            f"r = {str(target)!r} needs measured costs, and there are none for {key.host} ({key.method}, {key.dtype}, "
            f"batch size {key.batch}, {key.threads} threads) on this machine: measure them by "
            f"`dtem tune --model {key.host} --method {key.method}{batch}` or dtem.tune(handle, batch_size={key.batch})"
        )
    measured, resets = table, method.resets_each_block
    return target.solve(host.patches, host.depth, lambda plan: measured.seconds(plan, host), stages, resets)


def tuned_plan(model: nn.Module) -> TunedPlan:
    """The tuned plan of a patched model; a warning says where it was tuned for another machine."""
    tuned = _merger(model).tuned
    if tuned is None:
        raise DtemError(
            "r = 'tuned', but there is no tuned plan: tune the model by dtem.tune(handle, data, target='1.8x'), or "
            "load an adapter that was saved after that"
        )
    if tuned.machine != costs.cpu_name():
        warnings.warn(
            f"this plan was tuned for {tuned.machine}, and this is {costs.cpu_name()}: it merges the same tokens here, "
            "but may be slower than another; dtem.tune finds the plan for this machine",
            stacklevel=4,
        )
    return tuned


def _merger(model: nn.Module) -> Merger:
    merger = model.dtem
    assert isinstance(merger, Merger)
    return merger
