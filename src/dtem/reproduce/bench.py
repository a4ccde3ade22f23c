"""A model and images: what each cell of a study trains there, what tells it from others, and where it is kept."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from dtem import methods
from dtem.handle import Handle, patch
from dtem.reproduce import images
from dtem.reproduce.cells import Cell
from dtem.reproduce.specs import Study, Values
from dtem.training.config import TrainConfig, flat, resolve
from dtem.types import DtemError

_FREE = ("out", "data", "eval_data", "eval_r", "eval_every", "workers", "save_every", "log", "list_files", "bad")
"""Settings that change nothing in what is learned, or (data) are told by what is in them."""

Build = Callable[[Values, float], nn.Module]
"""The host by what is said of it (name, pool, …) and its stochastic depth, in eval mode."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a study is run."""

    study: Study
    scale: str
    work: Path
    build: Build
    data: str
    """What --data says; the study knows where train and eval are below it."""
    model: Values
    """What is said of the model at hand: at least its name. Nothing where the presets name it."""
    weights: dict[str, str]
    """Files of weights by model name; "" stands for any."""
    changes: Values = dataclasses.field(default_factory=dict)
    """Settings that win over the study's: updates, dtype, workers."""

    @property
    def splits(self) -> dict[str, str]:
        """Specs of the training and of the evaluation images."""
        asked = {**images.SPLITS[self.study.task], **self.study.at(self.scale).splits}
        place, mark, query = self.data.partition("?")  # captions.json?images=DIR
        return {name: text.replace("{data}", place) + mark + query for name, text in asked.items()}

    def learned_from(self, cell: Cell) -> str:
        """The images that a cell learns from."""
        train = self.splits["train"]
        if self.study.task != "classification":
            if cell.fraction != 1:
                raise DtemError(f"fraction = {cell.fraction} is for classification; leave it out")
            return train
        return images.learned_from(train, cell.fraction, cell.seed, self.work)

    def config(self, cell: Cell) -> TrainConfig:
        """The settings of a cell's training."""
        known = set(flat(TrainConfig()))
        settings = {**cell.settings, **self.changes}
        flags = {name: value for name, value in settings.items() if name in known}
        own = {name: value for name, value in settings.items() if name not in known}
        flags |= {"method": cell.method, "seed": cell.seed, "task": self.study.task}
        flags["options"] = {**settings.get("options", {}), **own}
        if cell.trained:
            flags |= {"data": self.learned_from(cell), "out": str(self.folder_of(cell) / "run")}
        return self._fitted(resolve(cell.preset or None, flags=flags)[0], cell.own)

    def _fitted(self, config: TrainConfig, asked: Sequence[str]) -> TrainConfig:
        """Options of the preset or the study may be those of another method, unlike those that were `asked` for; and
        what is random at the start goes by the seed."""
        dense = self.study.task == "segmentation"
        has = {field.name for field in dataclasses.fields(methods.find(config.method, dense).config_class)}
        options = {name: value for name, value in config.options.items() if name in has or name in asked}
        if "seed" in has:
            options.setdefault("seed", config.seed)
        return dataclasses.replace(config, options=options)

    def described(self, cell: Cell) -> Values:
        """What is known of the cell's model: its name, and how it is built."""
        named = resolve(cell.preset or None)[1]
        found = {**named, **self.model}
        if "name" not in found:
            raise DtemError(f"{cell.row}: which model? Give --model")
        return found

    def weights_of(self, cell: Cell) -> str | None:
        """The file that the model's weights come from; None: they come with it."""
        name = str(self.described(cell)["name"])
        return self.weights.get(name, self.weights.get(""))

    def host(self, cell: Cell) -> nn.Module:
        """The cell's model, unpatched."""
        config = self.config(dataclasses.replace(cell, trained=False))
        depth = config.drop_path if cell.trained and config.mode != "modular" else 0.0
        return self.build({**self.described(cell), "weights": self.weights_of(cell), "task": self.study.task}, depth)

    def untrained(self, cell: Cell) -> Handle:
        """The cell's model, patched, as training would start."""
        config = self.config(dataclasses.replace(cell, trained=False))
        return patch(self.host(cell), config.method, **config.options)

    def identity(self, cell: Cell) -> Values:
        """Everything that decides what a cell comes to. Cells of the same identity are the same, in whatever study."""
        config = flat(self.config(dataclasses.replace(cell, trained=False)))
        weights = self.weights_of(cell)
        found: Values = {
            "model": self.described(cell),
            "weights": None if weights is None else images.file_digest(weights),
            "eval": images.digest(self.splits["eval"]),
        }
        if cell.trained:
            # Settings at their defaults are left out, so that a new one does not make other cells of old ones.
            default = flat(TrainConfig())
            changed = {name: value for name, value in config.items() if value != default[name] or name == "method"}
            found["training"] = {name: value for name, value in changed.items() if name not in _FREE}
            found["learned_from"] = images.digest(self.learned_from(cell))
        else:
            found["method"] = {"name": config["method"], **config["options"]}
        plain: Values = json.loads(json.dumps(found))
        return plain

    def folder_of(self, cell: Cell) -> Path:
        """Where a cell is kept: by what it is, so that studies share it."""
        text = json.dumps(self.identity(cell), sort_keys=True)
        return self.work / "cells" / hashlib.sha256(text.encode()).hexdigest()[:16]
