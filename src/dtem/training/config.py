"""Settings of a training run. The flags of `dtem train`, the presets and YAML files all come from these dataclasses.

Later ones win: the defaults here, a preset (`presets/NAME.yaml`), a YAML file, settings given by name. Imports nothing
heavy: the command line reads it for --help.
"""

import contextlib
import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from dtem.data.augmentation import Augmentation
from dtem.errors import DtemError
from dtem.files import read_yaml
from dtem.tasks.captioning.generation_config import GenerationConfig
from dtem.tasks.segmentation.crop_config import CropConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run."""

    data: str = ""
    """Training images: a folder (one folder per class, or just images), timm:…, hf:…, hf-stream:… or wds:…."""
    eval_data: str = ""
    """Images to evaluate on during training and at the end; none: only the loss is logged."""
    out: str = "runs/dtem"
    """Folder of the run. The same command again resumes an interrupted run."""
    mode: Literal["modular", "end-to-end", "finetune"] = "modular"
    """modular: the adapter learns, the model is frozen. end-to-end: both, alternating. finetune: the model learns with
    tokens merged (baselines such as tome and evit)."""
    learn: tuple[Literal["embeddings", "norms", "biases"], ...] = ("embeddings", "norms")
    """modular: what learns. embeddings: of the method (its trained parts). norms: the adapter's own scales and biases
    for the model's norms; biases: its own biases for linear layers. May be given several times."""
    method: str = "dtem"
    """Reduction method."""
    adapter: str = ""
    """Adapter to start from: a file, a shipped name or a Hub id. Parts that it lacks start as usual."""
    loss: Literal["task", "distill", "both"] = "task"
    """task (labels), distill (KL to the unmerged model's own output; needs no labels) or both (their sum)."""
    distill_temperature: float = 1.0
    """Temperature of distillation."""
    r: str = "16"
    """Tokens merged per block; several with commas: one is drawn per update."""
    host_r: str = "13"
    """End-to-end: tokens merged per block in the updates that train the model."""
    r_warmup: float = 0.0
    """Part of the updates over which r grows from 0 to its value, by a cosine (as EViT's fine-tuning)."""
    embedding_every: int = 10
    """End-to-end: one in this many updates trains the embeddings, the others train the model."""
    epochs: float = 30
    """Passes over the data; 0 with `fisher_init`: no updates after it."""
    updates: int = 0
    """Optimiser updates; 0: as many as the epochs hold. Needed for streams, whose length is not known."""
    max_seconds: float = 0.0
    """Stop after this many seconds of training, with the cosine over that time; 0: no limit."""
    batch_size: int = 1024
    """Images per update, over all processes and accumulation steps."""
    grad_accum_steps: int = 1
    """Split each update into this many passes, to save memory."""
    norm_share: float = 0.5
    """modular: share of the updates that train norms and biases, with hard merging; the others train embeddings."""
    norm_r_from: float = 0.5
    """Updates that train norms draw a factor on r, from this to 1: one set of norms then serves every r."""
    lr: float = 1e-4
    """Peak learning rate of the embeddings."""
    norm_lr: float = 1e-3
    """Peak learning rate of norms and biases."""
    host_lr: float = 5e-6
    """Peak learning rate of the model (end-to-end, finetune)."""
    min_lr: float = 1e-6
    """Final learning rate of the cosine."""
    warmup: int = 0
    """Updates of linear warm-up."""
    weight_decay: float = 1e-4
    """Weight decay of matrices; vectors have none."""
    clip_grad: float = 5.0
    """Maximum gradient norm; 0: no clipping."""
    smoothing: float = 0.0
    """Label smoothing."""
    fisher_init: int = 0
    """Segmenter: initialise the embeddings from the Fisher information of this many batches."""
    drop_path: float = 0.1
    """Stochastic depth in the updates that train the model."""
    augmentation: Augmentation = dataclasses.field(default_factory=Augmentation)
    cropping: CropConfig = dataclasses.field(default_factory=CropConfig)
    generation: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Option of the method, e.g. temperature=0.05 or fisher=True; may be given several times."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision; other than float32 by autocast."""
    grad_checkpointing: bool = False
    """Gradient checkpointing: less memory, one more forward."""
    workers: int = 2
    """Processes that decode images."""
    on_decode_error: Literal["skip", "stop"] = "skip"
    """An image that cannot be read: skip (and count) or stop."""
    seed: int = 0
    """Seed of order, augmentation and everything drawn in training (random initialisation has its own: seed=N as an
    option of the method)."""
    eval_r: str = "0,8,13,16"
    """Values of r to evaluate at, with commas."""
    eval_every: int = 0
    """Updates between evaluations; 0: once per epoch."""
    save_every: int = 100
    """Updates between checkpoints."""
    log_with: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Tracker beside the progress bar and log.jsonl: tensorboard or wandb; may be given several times."""
    list_files: int = 10000
    """Write the names of the training files into the adapter, if there are no more than this."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), _choices(field.type)
            for each in value if typing.get_origin(field.type) is tuple else (value,):
                if choices and each not in choices:
                    raise DtemError(f"{field.name} = {each!r} is not known; choose one of: {', '.join(choices)}")
        for name in ("embedding_every", "batch_size", "grad_accum_steps", "save_every"):
            if (value := getattr(self, name)) < 1:
                raise DtemError(f"{name} = {value!r} must be 1 or more")
        for name in ("epochs", "lr", "norm_lr", "host_lr", "distill_temperature"):
            if not (value := getattr(self, name)) > 0 and not (name == "epochs" and value == 0 and self.fisher_init):
                raise DtemError(f"{name} = {value!r} must be more than 0")
        counts = ("updates", "warmup", "workers", "eval_every", "fisher_init", "seed", "list_files")
        for name in (*counts, "weight_decay", "clip_grad", "min_lr", "max_seconds"):
            if not (value := getattr(self, name)) >= 0:
                raise DtemError(f"{name} = {value!r} must be 0 or more")
        if not 0 <= self.smoothing < 1 or not 0 <= self.drop_path < 1:
            raise DtemError(
                f"smoothing = {self.smoothing} and drop_path = {self.drop_path} must be at least 0, below 1"
            )
        if not 0 <= self.r_warmup <= 1:
            raise DtemError(f"r_warmup = {self.r_warmup} must be a part of the updates, from 0 to 1")
        if not 0 < self.norm_share < 1 or not 0 < self.norm_r_from <= 1:
            raise DtemError(
                f"norm_share = {self.norm_share} must be between 0 and 1, norm_r_from = {self.norm_r_from} above 0 and "
                "at most 1"
            )
        if not self.learn:
            raise DtemError("learn = () trains nothing; choose from: embeddings, norms, biases")
        if self.fisher:
            for name, value in {"loss": "distill", "grad_checkpointing": False}.items():
                if (other := getattr(self, name)) != value:
                    raise DtemError(f"option fisher goes with {name} = {value!r}, not {other!r} (docs/train.md)")
        if self.fisher_init and self.grad_checkpointing:
            raise DtemError("fisher_init needs the input of every component: leave grad_checkpointing out")

    @property
    def eval_rates(self) -> tuple[str, ...]:
        """The values of r to evaluate at."""
        return tuple(part.strip() for part in self.eval_r.split(","))

    @property
    def method_options(self) -> dict[str, Any]:
        """The options of the method, with those that `learn` asks for."""
        if self.mode != "modular":
            return self.options
        return {**{name: True for name in ("norms", "biases") if name in self.learn}, **self.options}

    @property
    def fisher(self) -> bool:
        """Whether embeddings learn by the Fisher loss of the merges (an option of the method)."""
        return bool(self.options.get("fisher"))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The config of flat settings (those of the nested dataclasses among them); an unknown one is refused."""
        nested = {name: {field.name for field in dataclasses.fields(group)} for name, group in _GROUPS.items()}
        own = {field.name for field in dataclasses.fields(cls)} - nested.keys()
        known = own.union(*nested.values())
        if unknown := sorted(settings.keys() - known, key=str):
            raise DtemError(f"{unknown[0]!r} is not a training setting; the settings are: {', '.join(sorted(known))}")
        values = {name: _convert(cls, name, value) for name, value in settings.items() if name in own}
        for name, group in _GROUPS.items():
            changes = {key: _convert(group, key, value) for key, value in settings.items() if key in nested[name]}
            values[name] = group(**changes)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Flat settings, as `from_dict` takes them and YAML holds them."""
        values = dataclasses.asdict(self)
        for name in _GROUPS:
            values |= values.pop(name)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_GROUPS: dict[str, type] = {"augmentation": Augmentation, "cropping": CropConfig, "generation": GenerationConfig}


def resolve(
    preset: str | None = None,
    file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    dense: bool = False,
) -> tuple[TrainConfig, dict[str, Any]]:
    """The config of a preset, a YAML file and settings, and the arguments of the model that preset and file name.

    The options of a preset are for its own method: another method takes those that it has. `dense`: the model is one
    for dense prediction, where a method may have other options.
    """
    from_preset, *others = _read_preset(preset), _read_yaml(Path(file)) if file else {}, dict(settings or {})
    if "options" in from_preset:
        method = {name: value for layer in (from_preset, *others) for name, value in layer.items()}.get("method")
        options = _known_options(from_preset["options"], method or TrainConfig.method, dense)
        from_preset = {**from_preset, "options": options}
    merged: dict[str, Any] = {}
    for layer in (from_preset, *others):
        if not isinstance(layer.get("options", {}), dict):
            raise DtemError(
                f"options = {layer['options']!r} must be options by name, e.g. options: {{temperature: 0.05}}"
            )
        options = {**merged.get("options", {}), **layer.get("options", {})}
        merged |= layer
        if options:
            merged["options"] = options
    model = merged.pop("model", {})
    model = {"name": model} if isinstance(model, str) else model
    if not isinstance(model, dict) or not isinstance(model.get("name", ""), str):
        raise DtemError(
            f"model = {model!r} must be a name, or arguments by name: model: {{name: deit_tiny_patch16_224}}"
        )
    return TrainConfig.from_dict(merged), model


def _known_options(options: dict[str, Any], method: str, dense: bool) -> dict[str, Any]:
    from dtem import methods

    known = {field.name for field in dataclasses.fields(methods.find(method, dense).config_class)}
    return {name: value for name, value in options.items() if name in known}


def presets() -> dict[str, Path]:
    """The shipped presets, by name."""
    folder = Path(str(resources.files("dtem"))) / "training" / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read_preset(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    known = presets()
    if name not in known:
        raise DtemError(f"there is no preset {name!r}; choose one of: {', '.join(known)}")
    return _read_yaml(known[name])


def _read_yaml(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise DtemError(f"{path} must hold settings by name (lr: 1e-4), not {type(content).__name__}")
    if any(_deeper_than(2, value) for value in content.values()):
        raise DtemError(f"{path} is nested too deeply: settings are values, lists, or values and lists by name")
    return content


def _deeper_than(levels: int, value: Any) -> bool:
    """Whether lists and dictionaries are in each other more than `levels` deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and (levels == 0 or any(_deeper_than(levels - 1, part) for part in parts))


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, alone or as the element of a tuple."""
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    return typing.get_args(element) if typing.get_origin(element) is Literal else ()


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "options by name",
    str: "a text or a number",
}


def _convert(cls: type, name: str, value: Any) -> Any:
    """The value with the type of its field: YAML reads 1e-4 as text and 16 as a number, Python has numpy's numbers."""
    kind: Any = next(field.type for field in dataclasses.fields(cls) if field.name == name)
    value = _plain(value)
    if typing.get_origin(kind) in (tuple, types.UnionType):
        return None if value is None else _as_tuple(name, value, numbers=not _choices(kind))
    if _choices(kind):
        return value
    kind = typing.get_origin(kind) or kind
    if name == "options" and isinstance(value, dict):  # YAML has lists, methods take tuples
        plain = {option: _plain(each) for option, each in value.items()}
        return {option: tuple(each) if isinstance(each, list) else each for option, each in plain.items()}
    if kind is str:
        several = isinstance(value, list | tuple) and name in ("r", "host_r", "eval_r")  # r: [8, 16]
        parts = value if several else (value,)
        if all(isinstance(part, str | int | float | os.PathLike) and not isinstance(part, bool) for part in parts):
            return ",".join(map(str, parts))
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(value)
    if kind is str or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DtemError(f"{name} = {value!r} must be {_KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise DtemError(f"{name} = {value!r} must be a finite number")
    return value


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as those of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_tuple(name: str, value: Any, numbers: bool) -> tuple[Any, ...]:
    """Numbers, or texts, of which one may come alone."""
    if not numbers and isinstance(value, str):
        value = [value]

    def fits(each: Any) -> bool:
        return type(each) in (int, float) and math.isfinite(each) if numbers else isinstance(each, str)

    if not isinstance(value, list | tuple) or not all(map(fits, value)):
        raise DtemError(f"{name} = {value!r} must be a list of {'finite numbers' if numbers else 'texts'}")
    return tuple(value)
