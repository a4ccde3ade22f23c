"""Measured costs: the time of a forward by its plan, on this machine, kept in the user's cache.

A forward takes base + Σ_l block(s_l) + Σ_{l: r_l > 0} price(n_l), where n_l is the number of tokens that enter block l,
s_l what attention and MLP see on average, `block` a rising broken line and `price` what merging itself costs. Probe
plans are timed as whole forwards (`tuning.probes`), in any engine, and the parts are fitted to their times.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtem.errors import DtemError
from dtem.files import write_file
from dtem.types import HostSpec

FORMAT = "dtem-costs-1"
KNOTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
"""Corners of the broken line, as shares of all tokens."""
ATTENTION_SHARE = 0.4
"""Share of a block's time that goes by the tokens before merging; the rest by those after it."""


@dataclasses.dataclass(frozen=True)
class CostKey:
    """What a cost table is for."""

    host: str
    image: tuple[int, ...]
    method: str
    shortcut: bool
    """Whether the last block computes the class token alone."""
    batch: int
    dtype: str
    engine: str
    threads: int
    cpu: str
    torch: str
    dtem: str

    @property
    def path(self) -> Path:
        """Its file in the user's cache."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return cache_folder() / f"{self.host}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Fitted costs in seconds."""

    key: CostKey
    unmerged: float
    """The library's own model, never patched."""
    base: float
    steps: tuple[float, ...]
    """Rise of the broken line between two knots."""
    price: tuple[float, float]
    """Of a merge: a constant, and by the share of all tokens that enter."""
    error: float
    """Mean relative error over the probe plans."""

    def seconds(self, plan: Sequence[int], host: HostSpec) -> float:
        """Time of one forward of the batch by a plan; without any merging, that of the unmerged model."""
        if not any(plan):
            return self.unmerged
        weights = np.array([self.base, *self.steps, *self.price])
        return float(features(plan, host, self.key.shortcut) @ weights)

    def block_seconds(self, plan: Sequence[int], host: HostSpec) -> list[float]:
        """Time of every block by a plan."""
        merging = np.array([0.0, *self.steps, *self.price])
        return [float(row @ merging) for row in _by_block(plan, host, self.key.shortcut)]


def features(plan: Sequence[int], host: HostSpec, shortcut: bool) -> NDArray[np.float64]:
    """What the fitted parts of a forward's time are multiplied by."""
    total: NDArray[np.float64] = _by_block(plan, host, shortcut).sum(axis=0)
    total[0] = 1.0
    return total


def _by_block(plan: Sequence[int], host: HostSpec, shortcut: bool) -> NDArray[np.float64]:
    every = host.patches + host.prefix
    removed = np.cumsum(plan)
    after = (every - removed) / every
    before = (every - removed + np.asarray(plan)) / every
    seen = ATTENTION_SHARE * before + (1 - ATTENTION_SHARE) * after
    low, high = np.array(KNOTS[:-1]), np.array(KNOTS[1:])
    ramps = np.clip((seen[:, None] - low) / (high - low), 0.0, 1.0)
    merges = np.asarray(plan, dtype=np.float64) > 0
    if shortcut:
        ramps[-1], merges[-1] = 0.0, False
    return np.column_stack([np.zeros(len(plan)), ramps, merges, merges * before])


def fit(
    key: CostKey, host: HostSpec, unmerged: float, plans: Sequence[Sequence[int]], seconds: Sequence[float]
) -> CostTable:
    """The table whose times are nearest to those of probe plans, relative to each; no part is negative."""
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=np.float64)
    rows = np.array([features(plan, host, key.shortcut) for plan in plans])
    weights, _ = nnls(rows / measured[:, None], np.ones(len(plans)))
    error = float(np.abs(rows @ weights / measured - 1).mean())
    base, *rest = (float(weight) for weight in weights)
    return CostTable(key, unmerged, base, tuple(rest[:-2]), (rest[-2], rest[-1]), error)


def cache_folder() -> Path:
    """Where tables are kept: $DTEM_CACHE, or dtem in the user's cache folder."""
    own = os.environ.get("DTEM_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dtem", "costs")


def save(table: CostTable) -> Path:
    """Write a table to the user's cache."""
    path = table.key.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{path.parent} cannot be made ({error.strerror}): set DTEM_CACHE to another folder") from error
    write_file(path, json.dumps({"format": FORMAT, **dataclasses.asdict(table)}, indent=1))
    return path


def load(key: CostKey) -> CostTable | None:
    """The table of this machine, None if there is none; a damaged file is refused by name."""
    path = key.path
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT or CostKey(**_tuples(content.pop("key"))) != key:
            raise ValueError("it is of another format or for something else")
        table = CostTable(key, **_tuples(content))
        numbers = [table.unmerged, table.base, *table.steps, *table.price, table.error]
        if len(table.steps) != len(KNOTS) - 1 or len(table.price) != 2 or not np.isfinite(numbers).all():
            raise ValueError("its numbers are not those of a table")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DtemError(f"the cost table {path} is damaged ({error}): delete it, and measure again") from error
    return table


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def cpu_name() -> str:
    """This machine, as cost tables and tuned plans name it."""
    from dtem.measure.record import machine  # it imports timm

    described = machine()
    return f"{described['cpu']}, {described['cores']} cores"
