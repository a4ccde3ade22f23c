"""Where a run speaks: a progress bar, log.jsonl, and on request TensorBoard or Weights & Biases."""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dtem.schedule import PerLayer
from dtem.types import DtemError

LOG = "log.jsonl"


class Log:
    """The channels of one run. Only the first process speaks; on the others every call does nothing."""

    def __init__(self, folder: Path, channels: tuple[str, ...], total: int, start: int, speaks: bool) -> None:
        self._file = None
        self._bar: Any = None
        self._board: Any = None
        self._wandb: Any = None
        if not speaks:
            return
        from tqdm import tqdm

        self._file = open(folder / LOG, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._bar = tqdm(total=total, initial=start, unit="update", file=sys.stderr, dynamic_ncols=True)
        if "tensorboard" in channels:
            self._board = _tensorboard(folder)
        if "wandb" in channels:
            self._wandb = _wandb(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in (self._bar, self._board, self._file):
            if channel is not None:
                with contextlib.suppress(OSError):  # of a full disk, which `_write` has told of
                    channel.close()
        if self._wandb is not None:
            self._wandb.finish()

    def step(self, update: int, values: dict[str, float], rates: Sequence[int] = ()) -> None:
        """One update is done; `rates` are those that it has learned, if any."""
        if self._bar is not None:
            self._bar.update(1)
            shown = {name: f"{value:.4g}" for name, value in values.items() if "/" not in name}
            self._bar.set_postfix(shown | ({"r": compact(rates)} if rates else {}))
            self._write(update, values | {f"r/{layer}": float(r) for layer, r in enumerate(rates)})

    def note(self, update: int, values: dict[str, float], text: str) -> None:
        """Something worth a line of its own: an evaluation, a checkpoint."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
            self._write(update, values)

    def _write(self, update: int, values: dict[str, float]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps({"update": update, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise DtemError(f"{self._file.name} cannot be written: {error.strerror}") from error
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, update)
        if self._wandb is not None:
            self._wandb.log(values, step=update)


def compact(rates: Sequence[int]) -> str:
    """One r per block, as ``--r`` takes them."""
    return str(PerLayer(tuple(rates)))


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DtemError("log = 'tensorboard' needs the package tensorboard: pip install tensorboard") from error
    writer: Any = SummaryWriter
    return writer(folder / "tensorboard")


def _wandb(folder: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise DtemError("log = 'wandb' needs the package wandb: pip install wandb") from error
    return wandb.init(project="dtem", name=folder.name, dir=str(folder), resume="allow")
