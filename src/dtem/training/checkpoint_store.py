"""Files in the folder of a run: adapters (and the host, where it learns), the checkpoint, settings and log.

Every file is written whole or not at all; the checkpoint is read without unpickling anything but tensors and numbers.
"""

import contextlib
import hashlib
import io
import json
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from dtem.adapters import storage
from dtem.errors import DtemError
from dtem.files import lock, write_file
from dtem.training.config import TrainConfig
from dtem.training.logs import LOG

if TYPE_CHECKING:
    from accelerate import Accelerator

    from dtem.training.loop import TrainingRun

FORMAT = 3
CHECKPOINT = "last.pt"
ADAPTER, BEST_ADAPTER = "adapter.safetensors", "best.safetensors"
HOST, BEST_HOST = "model.safetensors", "best_model.safetensors"
METHOD = "dtem.method."
"""Prefix of the method's weights in a checkpoint."""
WAY_OUT = "choose another folder for out, or restart = True to begin anew"
_TYPES = {"config": str, "host": str, "weights": str, "update": int, "evaluated": int, "seconds": float}
_TYPES |= {"position": list, "best": float, "loss": float, "model": dict, "optimisers": dict, "digest": str}
_FREE_SETTINGS = {"workers", "save_every", "log_with", "out"}
"""Settings that may change when a run is resumed."""


class CheckpointStore:
    """The files of one run."""

    def __init__(self, folder: Path, accelerator: "Accelerator") -> None:
        self.folder = folder
        self.accelerator = accelerator

    @contextlib.contextmanager
    def locked(self, restart: bool) -> Iterator[None]:
        """Make the folder and lock it for this run, all processes of it; with `restart`, delete an earlier run."""
        with contextlib.ExitStack() as stack:
            if self.accelerator.is_main_process:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise DtemError(
                        f"{self.folder} cannot be made: {error.strerror}; choose another folder for out"
                    ) from error
                stack.enter_context(lock(self.folder, "training run"))
                for name in (CHECKPOINT, LOG, ADAPTER, BEST_ADAPTER, HOST, BEST_HOST) if restart else ():
                    (self.folder / name).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            yield

    def describe(self) -> str:
        """The weights that are in the folder."""
        path = self.folder / ADAPTER
        return f"the adapter so far: {path}" if path.exists() else f"the model so far: {self.folder / HOST}"

    def write_adapter(self, run: "TrainingRun", best: bool = False) -> None:
        """Write the adapter, and the host's weights where they learn."""
        if not self.accelerator.is_main_process:
            return
        handle, config = run.handle, run.config
        if handle.method.state_dict():
            handle.mode = "hard"  # a learned schedule is saved as inference uses it
            notes = {"mode": config.mode, "loss": config.loss, "batch": str(config.batch_size), "lr": str(config.lr)}
            notes |= {"seed": str(config.seed), "updates": str(run.update)}
            with handle.at(r=run.final_r):
                path = self.folder / (BEST_ADAPTER if best else ADAPTER)
                notes |= run.task.describe(run.seen_before)
                storage.save_pretrained(handle, path, trained_r=run.largest_r, notes=notes)
        if "host" in run.plan.parameters:
            state = {name: part.detach().cpu().contiguous() for name, part in handle.model.state_dict().items()}
            write_file(self.folder / (BEST_HOST if best else HOST), to_bytes(state))

    def save(self, run: "TrainingRun") -> None:
        """Write the adapter and the checkpoint of the last finished update."""
        self.write_adapter(run)
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            tensors = {
                "model": _state(run),
                "optimisers": {name: optimiser.state_dict()["state"] for name, optimiser in run.optimisers.items()},
            }
            state = {
                "format": FORMAT,
                "config": json.dumps(run.config.to_dict()),
                "host": run.handle.host.name,
                "weights": run.weights,
                "update": run.update,
                "evaluated": run.evaluated,
                "seconds": run.seconds,
                "position": list(run.position),
                "best": run.best,
                "loss": run.loss,
                **tensors,
                "digest": _digest(tensors),
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_file(self.folder / CHECKPOINT, buffer.getvalue())
        run.saved = run.update

    def resume(self, run: "TrainingRun", model_settings: Mapping[str, Any]) -> None:
        """Load the checkpoint into `run`, if there is one, and cut the log to its updates; write the settings."""
        settings = json.loads(json.dumps(run.config.to_dict()))
        path = self.folder / CHECKPOINT
        if path.exists():
            try:
                checkpoint = torch.load(path, map_location="cpu", weights_only=True)
                _check_types(checkpoint)
                self._check_run(checkpoint, run, settings)
                _check_tensors(checkpoint, run)
                _load(checkpoint, run)
            except DtemError:
                raise
            except Exception as error:  # torch raises errors of every kind for what is no checkpoint
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise DtemError(f"{path} is damaged or not a checkpoint ({reason}); {WAY_OUT}") from error
        if self.accelerator.is_main_process:
            import yaml

            content = ({"model": dict(model_settings)} if model_settings else {}) | settings
            write_file(self.folder / "config.yaml", yaml.safe_dump(content, sort_keys=False))
            log = self.folder / LOG
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if log.exists() else []
            write_file(log, "".join(line for line in lines if _is_before(line, run)))

    def _check_run(self, checkpoint: Mapping[str, Any], run: "TrainingRun", settings: Mapping[str, Any]) -> None:
        """A run resumes only with the settings, the host and the weights that it began with."""
        saved = TrainConfig().to_dict() | json.loads(checkpoint["config"])  # a setting newer than the run: its default
        for name in settings.keys() - _FREE_SETTINGS:
            if saved.get(name) != settings[name]:
                raise DtemError(
                    f"{self.folder} holds a run with {name} = {saved.get(name)!r}, now it is "
                    f"{settings[name]!r}: resume it with the same settings, {WAY_OUT}"
                )
        if checkpoint["host"] != run.handle.host.name:
            raise DtemError(f"{self.folder} holds a run on {checkpoint['host']}: {WAY_OUT}")
        if checkpoint["weights"] != run.weights:
            raise DtemError(
                f"{self.folder} holds a run that began with other weights of {checkpoint['host']}: {WAY_OUT}"
            )


def _check_types(checkpoint: Any) -> None:
    """Refuse what `CheckpointStore.save` has not written."""
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}, which this version reads")
    for name, kind in _TYPES.items():
        if type(value := checkpoint.get(name)) is not kind:
            raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    for value in (*checkpoint["position"], checkpoint["update"], checkpoint["evaluated"], checkpoint["seconds"]):
        if not value >= 0:
            raise ValueError(f"{value} is no number of updates, steps or seconds")
    epoch, step = map(operator.index, checkpoint["position"])
    checkpoint["position"] = (epoch, step)


def _check_tensors(checkpoint: Mapping[str, Any], run: "TrainingRun") -> None:
    """Refuse weights and optimiser states that are not those of the run, or have changed since they were written."""
    _check_shapes("weights", checkpoint["model"], _state(run))
    for name, optimiser in run.optimisers.items():
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for index, state in checkpoint["optimisers"][name].items():
            expected = {"step": torch.zeros(()), "exp_avg": parameters[index], "exp_avg_sq": parameters[index]}
            _check_shapes(f"optimiser states of parameter {index},", state, expected)
    if checkpoint["digest"] != _digest({name: checkpoint[name] for name in ("model", "optimisers")}):
        raise ValueError("its tensors have changed since they were written")


def _load(checkpoint: Mapping[str, Any], run: "TrainingRun") -> None:
    state = checkpoint["model"]
    if host := {name: part for name, part in state.items() if not name.startswith(METHOD)}:
        run.handle.model.load_state_dict(host)
    run.handle.method.load_state_dict({name.removeprefix(METHOD): state[name] for name in state.keys() - host.keys()})
    for name, optimiser in run.optimisers.items():
        optimiser.load_state_dict({**optimiser.state_dict(), "state": checkpoint["optimisers"][name]})
    if checkpoint["scaler"] is not None and run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(checkpoint["scaler"])
    for name in ("update", "evaluated", "seconds", "position", "best", "loss"):
        setattr(run, name, checkpoint[name])
    run.saved = run.update


def _check_shapes(what: str, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, unexpected, or of another shape or kind."""
    others = {
        name
        for name in stored.keys() & expected.keys()
        if (stored[name].shape, stored[name].is_floating_point())
        != (expected[name].shape, expected[name].is_floating_point())
    }
    for problem, names in (
        (f"lacks the {what}", expected.keys() - stored.keys()),
        (f"has unexpected {what}", stored.keys() - expected.keys()),
        (f"has other shapes of the {what}", others),
    ):
        if names:
            raise ValueError(f"it {problem} {min(names)}" + f" and {len(names) - 1} more" * (len(names) > 1))


def fingerprint(model: nn.Module) -> str:
    """A hash of all tensors of a model."""
    return _digest(model.state_dict())


def _digest(tensors: Mapping[Any, Any]) -> str:
    """A hash of the names and values of tensors, in dictionaries of any depth."""
    digest = hashlib.blake2b(digest_size=16)
    for name, part in tensors.items():
        digest.update(str(name).encode())
        if isinstance(part, Mapping):
            digest.update(_digest(part).encode())
        else:
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _state(run: "TrainingRun") -> dict[str, Tensor]:
    """What a checkpoint holds: the weights of the method and, where the host learns, those of the host."""
    method = {f"{METHOD}{name}": part for name, part in run.handle.method.state_dict().items()}
    state = run.handle.model.state_dict() if "host" in run.plan.parameters else {}
    return {name: part.detach().cpu() for name, part in {**state, **method}.items()}


def _is_before(line: str, run: "TrainingRun") -> bool:
    """Whether a line of the log is older than the checkpoint; False for one that a crash has cut off."""
    try:
        values = json.loads(line)
        return bool(values["update"] <= (run.evaluated if "eval/score" in values else run.update))
    except (ValueError, KeyError, TypeError):
        return False
