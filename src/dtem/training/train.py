"""`dtem.train`: train the embeddings of a model, or the model itself, on images."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dtem import integrations
from dtem.data.sources import Source
from dtem.errors import require
from dtem.handle import Handle
from dtem.measure import flops, record
from dtem.tables import Report, Table, giga
from dtem.training.config import TrainConfig, resolve
from dtem.training.loop import TrainingRun, open_accelerator
from dtem.training.stop_signals import StopSignals

_LABELS = {"top1": "top-1", "top5": "top-5", "cross_entropy": "cross-entropy"}


@dataclass(frozen=True, repr=False)
class TrainReport(Report):
    """The outcome of `train`."""

    handle: Handle
    """Handle of the trained model, in hard mode at the r that it was trained at."""
    folder: Path
    """Folder of the run: ``adapter.safetensors``, ``best.safetensors``, ``log.jsonl``, ``record.json``, …"""
    config: TrainConfig
    """All settings of the run."""
    updates: int
    """Updates of the run, earlier parts included."""
    seconds: float
    """Training time, earlier parts and evaluations included."""
    loss: float
    """Loss of the last update; NaN without any."""
    metrics: dict[str, dict[str, float]]
    """Metrics on the evaluation data, by r; empty without such data."""
    outcomes: dict[str, Any]
    """Outcomes of every evaluation image, by r, as the task stores them."""
    macs: dict[str, int]
    """Multiply-adds of one image, by r."""
    learned_r: tuple[int, ...]
    """Learned r of every block, for methods that learn it; else empty."""
    skipped: dict[str, str]
    """Training images that could not be read, and why."""
    waiting_for_data: float
    """Part of the training time spent waiting for images."""
    is_main_process: bool
    """False on all processes but the first: it writes and prints for all."""

    @property
    def files(self) -> list[str]:
        """Names of the weight files in the folder."""
        return sorted(path.name for path in self.folder.glob("*.safetensors"))

    def to_dict(self) -> dict[str, Any]:
        learned = {"r": list(self.learned_r), "macs": self.macs["learned"]} if self.learned_r else None
        return {
            "model": self.handle.host.name,
            "config": self.config.to_dict(),
            "updates": self.updates,
            "seconds": self.seconds,
            "loss": self.loss if self.updates else None,
            "waiting_for_data": self.waiting_for_data,
            "skipped": self.skipped,
            "learned": learned,
            "evaluation": [{"r": r, **values, "macs": self.macs[r]} for r, values in self.metrics.items()],
            "files": self.files,
        }

    def parts(self) -> list[Table | str]:
        slower = "images" if self.waiting_for_data > 0.5 else "the model"
        lines = [
            f"{self.updates} updates, last loss {self.loss:.4f}; waited for images {100 * self.waiting_for_data:.0f} % "
            f"of the time (the bottleneck is {slower})"
            if self.updates
            else f"no updates: embeddings by Fisher initialisation on {self.config.fisher_init} batches",
            f"files in {self.folder}: {', '.join(self.files)}",
        ]
        if self.learned_r:
            r = "/".join(map(str, self.learned_r))
            lines.append(f"learned r: {r}, {giga(self.macs['learned'])} GMACs")
        if self.skipped:
            name, reason = next(iter(self.skipped.items()))
            lines.append(f"{len(self.skipped)} images could not be read and were skipped, e.g. {name}: {reason}")
        if not self.metrics:
            return [*lines]
        names = list(next(iter(self.metrics.values())))
        columns = ("r", *(_LABELS.get(name, name) for name in names), "GMACs")
        rows = [
            (r, *(f"{values[name]:.4g}" for name in names), giga(self.macs[r])) for r, values in self.metrics.items()
        ]
        return [Table(f"{self.handle.host.name} on {self.config.eval_data}", columns, rows), *lines]

    def __repr__(self) -> str:
        return f"TrainReport({str(self.folder)!r}, updates={self.updates}, loss={self.loss:.4g})"


def train(
    model: nn.Module,
    data: str | os.PathLike[str] | Source,
    *,
    preset: str | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
    out: str | os.PathLike[str] | None = None,
    restart: bool = False,
    model_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainReport:
    """Train the merging of `model` on images, and evaluate it. The model is patched in place.

    By default the embeddings of DTEM learn and the model is frozen; ``mode="end-to-end"`` and ``mode="finetune"`` train
    the model too. The run lives in the folder `out`: the same call again resumes it where it was interrupted.
    Ctrl-C (or SIGTERM) lets the update end, saves, and raises KeyboardInterrupt.

    Args:
        model: a supported model, not patched, with its weights. To train the model itself, build it with stochastic
            depth (``create_model(…, drop_path_rate=0.1)``).
        data: training data: a folder or any other spec of `dtem.data.sources`; for a Segmenter images with masks, for
            GIT images with captions; or an opened source.
        preset: settings to start from, e.g. ``"few"`` for a few thousand images and some minutes on a CPU.
        config: a YAML file of settings, which win over the preset; or a whole `TrainConfig`.
        out: folder of the run; default ``runs/dtem``.
        restart: delete an earlier run in `out` instead of resuming it.
        model_settings: what ``config.yaml`` in the folder is to say of the model: ``{"name": …}`` and other arguments
            of `create_model`.
        settings: fields of `dtem.training.config.TrainConfig` by name; they win over preset and config.

    Returns:
        The report: the handle of the trained model, metrics by r, and files. It prints as a table.

    Examples:
        >>> model = dtem.create_model("deit_tiny_patch16_224")
        >>> report = dtem.train(model, "photos", preset="few", eval_data="imagenet/val", out="runs/mine")
        >>> report.metrics["16"]["top1"]
        >>> handle = dtem.from_pretrained("runs/mine/best.safetensors", dtem.create_model("deit_tiny_patch16_224"))
    """
    source = data if isinstance(data, Source) else None
    settings["data"] = data.spec if isinstance(data, Source) else os.fspath(data)
    if out is not None:
        settings["out"] = os.fspath(out)
    if isinstance(config, TrainConfig):
        config = TrainConfig.from_dict(config.to_dict() | settings)
    else:
        dense = integrations.find(model).describe(model).dense
        config, _ = resolve(preset, None if config is None else Path(config), settings, dense=dense)
    with _own_accelerate_state(), StopSignals() as signals:
        run = TrainingRun(model, config, open_accelerator(config), signals, source)
        with run.store.locked(restart):
            run.store.resume(run, model_settings or {})
            return _report(run, run.run())


@contextlib.contextmanager
def _own_accelerate_state() -> Iterator[None]:
    """accelerate has one state per process, with the precision in it: give one of the caller's back afterwards."""
    state = require("accelerate", "train").state.AcceleratorState._shared_state
    before = dict(state)
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def _report(run: TrainingRun, outcomes: dict[str, Any]) -> TrainReport:
    """The report of a finished run; the first process writes its record."""
    metrics = {r: run.task.metrics(part) for r, part in outcomes.items()}
    handle, macs = run.handle, {}
    for r in {**metrics, **({"learned": None} if run.learned else {})}:
        with handle.at(r=r):
            macs[r] = flops.count(handle.model, handle.host.image).macs
    report = TrainReport(
        handle=handle,
        folder=run.store.folder,
        config=run.config,
        updates=run.update,
        seconds=run.seconds,
        loss=run.loss,
        metrics=metrics,
        outcomes=outcomes,
        macs=macs,
        learned_r=tuple(handle.plan) if handle.r == "learned" else (),
        skipped=run.task.loader.skipped,
        waiting_for_data=run.waiting,
        is_main_process=run.accelerator.is_main_process,
    )
    if report.is_main_process:
        record.save(record.collect("train", [report.to_dict()], seed=run.config.seed), report.folder / "record.json")
    return report
