"""Logs of a run: a progress bar, log.jsonl, and by accelerate's trackers TensorBoard or Weights & Biases."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dtem.errors import DtemError, require
from dtem.schedule import PerLayer

if TYPE_CHECKING:
    from accelerate import Accelerator

LOG = "log.jsonl"


class Log:
    """All logs of one run. Only the main process writes; on the others every call does nothing.

    Args:
        folder: of the run.
        accelerator: with its trackers, if any (`log_with` of the config).
        total: updates of the whole run; None: not known.
        start: updates that are done.
    """

    def __init__(self, folder: Path, accelerator: "Accelerator", total: int | None = None, start: int = 0) -> None:
        self._accelerator = accelerator
        self._file: Any = None
        self._bar: Any = None
        if not accelerator.is_main_process:
            return
        from tqdm import tqdm

        self._file = open(folder / LOG, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=total, initial=start, unit="update", file=sys.stderr, dynamic_ncols=True, mininterval=interval
        )
        options = {"wandb": {"name": folder.name, "dir": str(folder), "resume": "allow"}}
        accelerator.init_trackers("dtem", init_kwargs=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is None:
            return
        for part in (self._bar, self._file):
            with contextlib.suppress(OSError):  # of a full disk, which `_write` has reported
                part.close()
        for tracker in self._accelerator.trackers:  # not end_training(): that ends the process group as well
            tracker.finish()

    def step(self, update: int, values: dict[str, float], rates: Sequence[int] = ()) -> None:
        """Log one update; `rates`: learned r of every block, if any."""
        if self._bar is not None:
            shown = {name: f"{value:.4g}" for name, value in values.items() if "/" not in name}
            self._bar.set_postfix(shown | ({"r": per_block(rates)} if rates else {}), refresh=False)
            self._bar.update(1)
            self._write(update, values | {f"r/{layer}": float(r) for layer, r in enumerate(rates)})

    def note(self, update: int, values: dict[str, float], text: str) -> None:
        """Log something with a line of its own, such as an evaluation."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
            self._write(update, values)

    def _write(self, update: int, values: dict[str, float]) -> None:
        try:
            self._file.write(json.dumps({"update": update, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise DtemError(f"{self._file.name} cannot be written: {error.strerror}") from error
        self._accelerator.log(values, step=update)


def per_block(rates: Sequence[int]) -> str:
    """One r per block, as the setting ``r`` takes it."""
    return str(PerLayer(tuple(rates)))


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing; accelerate would leave them out silently."""
    for name in names:
        require(name, extra=name)
