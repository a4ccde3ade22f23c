"""Settings of a training run. The command line, the presets and the YAML files all come from these dataclasses.

Later ones win: the defaults here, a preset (`presets/NAME.yaml`), a YAML file, flags. Nothing heavy is imported: this
is read for `dtem train --help`.
"""

import dataclasses
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from dtem.tasks.captioning.style import Style
from dtem.tasks.classification.augmentation import Augmentation
from dtem.tasks.segmentation.augmentation import Views

TASKS = ("classification", "segmentation", "captioning")
MODES = ("modular", "end-to-end", "finetune")
LOSSES = ("task", "distill", "both")
DTYPES = ("fp32", "bf16", "fp16")
LOGS = ("tensorboard", "wandb")
SCHEDULES = ("given", "learned")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    task: str = "classification"
    """What the model does: classification, segmentation or captioning."""
    data: str = ""
    """Training images: a folder (one folder per class, or just images), timm:…, hf:…, hf-stream:… or wds:…."""
    eval_data: str = ""
    """Images to evaluate on while training; none: only the loss is watched."""
    out: str = "runs/dtem"
    """Folder of the run. The same command again goes on where a run was stopped."""
    mode: str = "modular"
    """modular: embeddings learn, the model is frozen. end-to-end: both, in turns. finetune: the model learns while
    tokens are merged (baselines such as tome and evit)."""
    method: str = "dtem"
    """Reduction method."""
    loss: str = "task"
    """task (labels), distill (the unmerged model's own output; needs no labels) or both (their sum)."""
    distill_temperature: float = 1.0
    """Both sides of the distillation are softened by this."""
    r: str = "16"
    """Tokens merged per block in soft steps and in finetune; several with commas: one is drawn per update."""
    schedule: str = "given"
    """given: --r says how much each block merges. learned: that is learned too, at the cost that --gflops names."""
    gflops: float = 0.0
    """With a learned schedule, what the model is to cost: GFLOPs (MACs) per image. The rates start from the same r in
    every block."""
    host_r: str = "13"
    """Tokens merged per block in the steps that train the model (end-to-end)."""
    ramp: float = 0.0
    """Part of the updates over which r grows from nothing to its value, by a cosine (EViT's fine-tuning has one)."""
    every: int = 10
    """End-to-end: one of so many updates trains the embeddings, the rest train the model."""
    epochs: float = 30
    """Passes over the data; 0 after `sense`: the start is all there is."""
    updates: int = 0
    """Optimiser updates; 0: as many as the epochs hold. Needed for streams, whose length is not known."""
    batch: int = 1024
    """Images per update, over all processes and accumulation steps."""
    accumulate: int = 1
    """Split each update into so many passes, to save memory."""
    lr: float = 1e-4
    """Peak learning rate of the embeddings."""
    host_lr: float = 5e-6
    """Peak learning rate of the model (end-to-end, finetune)."""
    min_lr: float = 1e-6
    """Where the cosine ends."""
    warmup: int = 0
    """Updates of linear warm-up."""
    weight_decay: float = 1e-4
    """Of matrices; vectors have none."""
    clip: float = 5.0
    """Largest norm of a gradient; 0: not clipped."""
    smoothing: float = 0.0
    """Label smoothing."""
    sense: int = 0
    """Segmenter: start the embeddings from how sensitive the output is to what they read, found on so many batches."""
    drop_path: float = 0.1
    """Stochastic depth in the steps that train the model."""
    augment: Augmentation = dataclasses.field(default_factory=Augmentation)
    views: Views = dataclasses.field(default_factory=Views)
    style: Style = dataclasses.field(default_factory=Style)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the method, NAME=VALUE, e.g. temperature=0.05 (may be given several times)."""
    dtype: str = "fp32"
    """Autocast: fp32 (none), bf16 or fp16."""
    checkpointing: bool = False
    """Gradient checkpointing: less memory, one more forward."""
    workers: int = 2
    """Processes that decode images."""
    bad: str = "skip"
    """An image that cannot be read: skip (and count) or stop."""
    seed: int = 0
    """Of order, augmentation and all that is drawn in training (a random start has its own: --option seed=N)."""
    eval_r: str = "0,8,13,16"
    """Rates to evaluate at (where the schedule is learned, at that alone by default)."""
    eval_every: int = 0
    """Updates between evaluations; 0: once per epoch."""
    save_every: int = 100
    """Updates between checkpoints."""
    log: tuple[str, ...] = ()
    """More channels beside the console and log.jsonl: tensorboard, wandb (may be given several times)."""
    list_files: int = 10000
    """Write the names of the training files into the adapter, if there are no more than so many."""

    def __post_init__(self) -> None:
        choices = {
            "task": TASKS,
            "mode": MODES,
            "loss": LOSSES,
            "dtype": DTYPES,
            "schedule": SCHEDULES,
            "bad": ("skip", "stop"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise _error(f"{name} = {value!r} is not known; choose one of: {', '.join(allowed)}")
        if unknown := set(self.log) - set(LOGS):
            raise _error(f"log = {sorted(unknown)[0]!r} is not known; choose one of: {', '.join(LOGS)}")
        for name in ("every", "batch", "accumulate", "save_every"):
            if (value := getattr(self, name)) < 1:
                raise _error(f"{name} = {value!r} must be 1 or more")
        for name in ("epochs", "lr", "host_lr", "distill_temperature"):
            if not (value := getattr(self, name)) > 0 and not (name == "epochs" and value == 0 and self.sense):
                raise _error(f"{name} = {value!r} must be more than 0")
        for name in ("updates", "warmup", "weight_decay", "clip", "min_lr", "workers", "eval_every", "gflops", "sense"):
            if not (value := getattr(self, name)) >= 0:
                raise _error(f"{name} = {value!r} must be 0 or more")
        if not 0 <= self.smoothing < 1 or not 0 <= self.drop_path < 1:
            raise _error(f"smoothing = {self.smoothing} and drop_path = {self.drop_path} must be at least 0, below 1")
        if not 0 <= self.ramp <= 1:
            raise _error(f"ramp = {self.ramp} must be a part of the updates, from 0 to 1")
        if self.schedule == "learned" and not self.gflops:
            raise _error("schedule = 'learned' needs to know at which cost: give --gflops, e.g. 0.65")
        if self.schedule == "learned" and self.mode != "modular":
            raise _error(f"schedule = 'learned' goes with mode = 'modular', not {self.mode!r}: the model is frozen")
        if self.options.get("learn_rates") and self.schedule != "learned":
            raise _error("option learn_rates goes with schedule = 'learned', which says so itself")
        if self.gflops and self.schedule != "learned":
            raise _error(
                f"gflops = {self.gflops:g} goes with schedule = 'learned'; a fixed schedule of that cost is "
                f"r = '{self.gflops:g}G'"
            )
        if self.options.get("priced"):
            for name, value in {"loss": "distill", "checkpointing": False}.items():
                if (other := getattr(self, name)) != value:
                    raise _error(f"option priced goes with {name} = {value!r}, not {other!r} (docs/training.md)")
        if self.sense and self.checkpointing:
            raise _error("sense needs to see what every component reads: leave checkpointing out")
        if self.mode == "modular" and self.method == "tome_soft":
            raise _error("method 'tome_soft' has nothing that learns beside the model; use mode = 'end-to-end'")

    @property
    def eval_rates(self) -> tuple[str, ...]:
        """The rates to evaluate at, one by one."""
        if self.schedule == "learned" and self.eval_r == TrainConfig.eval_r:
            return ("learned",)
        return tuple(part.strip() for part in self.eval_r.split(","))


def resolve(
    preset: str | None = None, file: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings that preset, file and flags come to, and what the preset says of the model (its name and so on).

    A preset's options are for the method that it was made for: of those, another one takes what it has.
    """
    shipped, *given = _preset(preset), _read(Path(file)) if file else {}, dict(flags or {})
    if "options" in shipped:
        said = {
            name: value for layer in (shipped, *given) for name, value in layer.items() if name in ("task", "method")
        }
        shipped = {**shipped, "options": _known_options(shipped["options"], **said)}
    merged: dict[str, Any] = {}
    for layer in (shipped, *given):
        if not isinstance(layer.get("options", {}), dict):
            raise _error(
                f"options = {layer['options']!r} must be {_WORDS['dict']}, e.g. options: {{temperature: 0.05}}"
            )
        options = {**merged.get("options", {}), **layer.get("options", {})}
        merged |= layer
        if options:
            merged["options"] = options
    model = merged.pop("model", {})
    return build(merged), model if isinstance(model, dict) else {"name": model}


def _known_options(
    options: dict[str, Any], task: str = TrainConfig.task, method: str = TrainConfig.method
) -> dict[str, Any]:
    from dtem import methods

    known = {field.name for field in dataclasses.fields(methods.find(method, task == "segmentation").config_class)}
    return {name: value for name, value in options.items() if name in known}


def build(values: Mapping[str, Any]) -> TrainConfig:
    """A config from flat names (those of the dataclasses inside it among them); an unknown one is refused."""
    inner = {name: {field.name for field in dataclasses.fields(cls)} for name, cls in _INNER.items()}
    own = {field.name for field in dataclasses.fields(TrainConfig)} - inner.keys()
    known = own.union(*inner.values())
    if unknown := sorted(values.keys() - known):
        raise _error(f"{unknown[0]!r} is no training setting; known are: {', '.join(sorted(known))}")
    wanted = {name: _fit(TrainConfig, name, value) for name, value in values.items() if name in own}
    for name, cls in _INNER.items():
        wanted[name] = cls(**{each: _fit(cls, each, value) for each, value in values.items() if each in inner[name]})
    return TrainConfig(**wanted)


_INNER: dict[str, type] = {"augment": Augmentation, "views": Views, "style": Style}


def flat(config: TrainConfig) -> dict[str, Any]:
    """The settings as `build` takes them and YAML holds them."""
    values = dataclasses.asdict(config)
    for name in _INNER:
        values |= values.pop(name)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def presets() -> dict[str, Path]:
    """The shipped presets, by name."""
    folder = Path(str(resources.files("dtem"))) / "training" / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _preset(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    known = presets()
    if name not in known:
        raise _error(f"there is no preset {name!r}; choose one of: {', '.join(known)}")
    return _read(known[name])


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _error(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise _error(f"{path} must hold settings by name (lr: 1e-4), not {type(found).__name__}")
    return found


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "dict": (dict,)}


def _fit(cls: type, name: str, value: Any) -> Any:
    """The value with the type of its field: YAML reads 1e-4 as text and 16 as a number."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    kind = str(field.type).removeprefix("<class '").partition("'")[0].partition("[")[0]
    if kind == "tuple" or "tuple" in kind:
        return None if value is None else _several(field, value)
    if name == "options" and isinstance(value, dict):  # YAML has lists, methods take tuples
        return {option: tuple(each) if isinstance(each, list) else each for option, each in value.items()}
    if kind == "str" and isinstance(value, list):  # r: [8, 16], where a flag has --r 8,16
        return ",".join(map(str, value))
    if kind == "str" and isinstance(value, dict):
        raise _error(f"{name} = {value!r} must be a text or a number")
    if kind == "str" and not isinstance(value, bool):
        return str(value)
    if kind == "float" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    if kind in _KINDS and (not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool")):
        raise _error(f"{name} = {value!r} must be {_WORDS[kind]}")
    return float(value) if kind == "float" else value


def _several(field: dataclasses.Field[Any], value: Any) -> tuple[Any, ...]:
    """Of a field that holds several values: texts, of which one may come alone, or numbers."""
    texts = "str" in str(field.type)
    if texts and isinstance(value, str):
        value = [value]
    kinds = (str,) if texts else (int, float)
    if not isinstance(value, list | tuple) or not all(isinstance(each, kinds) for each in value):
        raise _error(f"{field.name} = {value!r} must be a list of {'texts' if texts else 'numbers'}")
    return tuple(value)


_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "dict": "options by name"}


def _error(message: str) -> ValueError:
    from dtem.types import DtemError

    return DtemError(message)
