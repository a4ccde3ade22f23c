"""What a run leaves in its folder: the adapter (and the host, where it learns) at its best and at last, and where the
run stands, so that the same command goes on from there."""

import json
from typing import TYPE_CHECKING

from safetensors.torch import save as to_bytes

from dtem import storage
from dtem.files import write_file
from dtem.training import checkpoint
from dtem.training.config import TrainConfig, flat
from dtem.training.logs import LOG
from dtem.types import DtemError

if TYPE_CHECKING:
    from dtem.training.loop import Run

ADAPTER, BEST = "adapter.safetensors", "best.safetensors"
HOST, BEST_HOST = "model.safetensors", "best_model.safetensors"


def prepare(run: "Run", restart: bool) -> None:
    """Make the folder, emptied of an earlier run if that is asked for."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtemError(f"{run.folder} cannot be made: {error.strerror}; choose another --out") from error
    if restart and run.accelerator.is_main_process:
        for name in (checkpoint.FILE, LOG, ADAPTER, BEST, HOST, BEST_HOST):
            (run.folder / name).unlink(missing_ok=True)
    run.accelerator.wait_for_everyone()


def write(run: "Run", adapter: str, host: str) -> None:
    """The files that users take away."""
    if not run.accelerator.is_main_process:
        return
    config, rate = run.config, max(run.plan.phases[0].rates, key=run.merges.__getitem__)
    if run.handle.method.state_dict():
        run.handle.mode = "hard"  # a learned schedule is kept as inference uses it
        asked, run.handle.r = run.handle.r, run.rate
        told = ("mode", "loss", "batch", "lr", "seed")
        notes = {name: str(getattr(config, name)) for name in told} | {"updates": str(run.update)}
        storage.save(run.handle, run.folder / adapter, trained_r=rate, notes=notes | run.task.describe())
        run.handle.r = asked
    if "host" in run.plan.parameters:
        state = run.handle.model.state_dict().items()
        kept = {name: part.detach().cpu().contiguous() for name, part in state if not name.startswith("dtem.")}
        write_file(run.folder / host, to_bytes(kept))


def save(run: "Run") -> None:
    """The adapter as it is now, and the checkpoint."""
    write(run, ADAPTER, HOST)
    if run.accelerator.is_main_process:
        state = run.handle.model.state_dict().items()
        learned = {name: part.cpu() for name, part in state if "host" in run.plan.parameters or "dtem." in name}
        scaler = run.accelerator.scaler
        checkpoint.save(
            run.folder,
            {
                "config": json.dumps(flat(run.config)),
                "host": run.handle.host.name,
                "weights": run.weights,
                "update": run.update,
                "position": list(run.position),
                "best": run.best,
                "loss": run.loss,
                "model": learned,
                "optimisers": {name: optimiser.state_dict() for name, optimiser in run.optimisers.items()},
                "scaler": None if scaler is None else scaler.state_dict(),
            },
        )
    run.accelerator.wait_for_everyone()


def resume(run: "Run") -> None:
    """Put the run where its checkpoint says, if there is one; what was logged after that is struck out."""
    state = checkpoint.load(run.folder)
    now = json.loads(json.dumps(flat(run.config)))
    if state is not None:
        saved = flat(TrainConfig()) | json.loads(state["config"])  # a setting newer than the run was at its default
        checkpoint.check_same(saved, now, run.folder)
        if state["host"] != run.handle.host.name:
            raise DtemError(f"{run.folder} holds a run on {state['host']}; choose another --out, or --restart")
        if state.get("weights", run.weights) != run.weights:  # runs of version 0.2 have not kept it
            raise DtemError(
                f"{run.folder} holds a run that began with other weights of {state['host']}; choose another --out, or "
                "--restart"
            )
        run.handle.model.load_state_dict(state["model"], strict=False)
        for name, optimiser in run.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        if state["scaler"] is not None and run.accelerator.scaler is not None:
            run.accelerator.scaler.load_state_dict(state["scaler"])
        run.update, run.best, run.loss = state["update"], state["best"], state["loss"]
        run.position = (state["position"][0], state["position"][1])
    if run.accelerator.is_main_process:
        import yaml

        told = ({"model": run.named} if run.named else {}) | now
        write_file(run.folder / "config.yaml", yaml.safe_dump(told, sort_keys=False))
        log = run.folder / LOG
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        write_file(log, "".join(line for line in lines if _logged(line) <= run.update))


def _logged(line: str) -> float:
    """The update that a line of the log is about; a line that was cut off by a crash belongs to none."""
    try:
        return float(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
