"""Model, data and training config of each cell of a study, and the folder of its files."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from torch import nn

import dtem
from benchmarks.reproduce import image_splits, search
from benchmarks.reproduce.cells import Cell
from benchmarks.reproduce.specs import Study, Values
from dtem import methods
from dtem.errors import DtemError
from dtem.handle import Handle, patch
from dtem.training.config import TrainConfig, resolve

_NOT_IDENTITY = (
    "out",
    "data",
    "eval_data",
    "eval_r",
    "eval_every",
    "workers",
    "save_every",
    "log_with",
    "list_files",
    "on_decode_error",
)
"""Training settings that do not change the trained weights, or (data) are part of the identity by content."""


@dataclasses.dataclass(frozen=True)
class StudySetup:
    """A study at a scale, with the model and images it is run on."""

    study: Study
    scale: str
    work: Path
    """Folder of all cells, shared by all studies."""
    data: str
    """--data; `image_splits.SPLITS` or the study says where train and eval are in it."""
    model: Values
    """`create_model` arguments, ``name`` among them; empty: the presets name the model."""
    weights: dict[str, str]
    """Weight files by model name; "" stands for any."""
    overrides: Values = dataclasses.field(default_factory=dict)
    """Training settings that override the study's: updates, dtype, workers."""
    create: Callable[..., nn.Module] = dtem.create_model

    @property
    def measure(self) -> str:
        """What is measured, of `specs.MEASURES`."""
        return self.study.at(self.scale).measure

    @property
    def splits(self) -> dict[str, str]:
        """Data specs of the training and the evaluation images."""
        specs = {**image_splits.SPLITS[self.study.task], **self.study.at(self.scale).splits}
        location, mark, query = self.data.partition("?")  # captions.json?images=DIR
        return {name: spec.replace("{data}", location) + mark + query for name, spec in specs.items()}

    def training_images(self, cell: Cell) -> str:
        """Data spec of the cell's training images."""
        train = self.splits["train"]
        if self.study.task != "classification":
            if cell.fraction != 1:
                raise DtemError(f"fraction = {cell.fraction} is for classification; leave it out")
            return train
        return image_splits.training_images(train, cell.fraction, cell.seed, self.work)

    def config(self, cell: Cell) -> TrainConfig:
        """The cell's training config; a learning rate that is searched is the one that was found."""
        cell = search.resolve(self, cell)
        known = TrainConfig().to_dict().keys()
        merged = {**cell.settings, **self.overrides}
        settings = {name: value for name, value in merged.items() if name in known}
        options = {name: value for name, value in merged.items() if name not in known}
        settings.setdefault("learn", ["embeddings"])  # as in the paper; every study may say otherwise
        settings |= {"method": cell.method, "seed": cell.seed, "options": {**merged.get("options", {}), **options}}
        if cell.trained:
            settings |= {"data": self.training_images(cell), "out": str(self.folder(cell) / "run")}
        dense = self.study.task == "segmentation"
        config, _ = resolve(cell.preset or None, settings=settings, dense=dense)
        # Options of the whole study are for the methods that have them; a cell's own must fit its method.
        has = {field.name for field in dataclasses.fields(methods.find(config.method, dense).config_class)}
        fitting = {name: value for name, value in config.options.items() if name in has or name in cell.own_settings}
        if "seed" in has:
            fitting.setdefault("seed", config.seed)  # of random initialisation
        return dataclasses.replace(config, options=fitting)

    def model_of(self, cell: Cell) -> Values:
        """`create_model` arguments of the cell's model, weights aside."""
        model = {**resolve(cell.preset or None)[1], **self.model}
        if "name" not in model:
            raise DtemError(f"{cell.row}: which model? Give --model")
        return model

    def weights_of(self, cell: Cell) -> str | None:
        """Weight file of the cell's model; None: published weights."""
        return self.weights.get(str(self.model_of(cell)["name"]), self.weights.get(""))

    def host(self, cell: Cell) -> nn.Module:
        """The cell's model, unpatched."""
        config = self.config(dataclasses.replace(cell, trained=False))
        drop_path = config.drop_path if cell.trained and config.mode != "modular" else 0.0
        return self.create(**self.model_of(cell), weights=self.weights_of(cell), drop_path_rate=drop_path)

    def untrained(self, cell: Cell) -> Handle:
        """The cell's model, patched and initialised as for training."""
        config = self.config(dataclasses.replace(cell, trained=False))
        return patch(self.host(cell), config.method, **config.options)

    def identity(self, cell: Cell) -> Values:
        """Everything that determines the cell's result. Cells of one identity are shared between studies."""
        config = self.config(dataclasses.replace(cell, trained=False)).to_dict()
        weights = self.weights_of(cell)
        identity: Values = {
            "model": self.model_of(cell),
            "weights": None if weights is None else image_splits.file_digest(weights),
            "eval": image_splits.digest(self.splits["eval"]),
        }
        if cell.trained:
            # Only settings that differ from their defaults: a new setting does not change the identity of old cells.
            default = TrainConfig().to_dict()
            changed = {name: value for name, value in config.items() if value != default[name] or name == "method"}
            identity["training"] = {name: value for name, value in changed.items() if name not in _NOT_IDENTITY}
            identity["training_images"] = image_splits.digest(self.training_images(cell))
        else:
            identity["method"] = {"name": config["method"], **config["options"]}
        plain: Values = json.loads(json.dumps(identity))
        return plain

    def folder(self, cell: Cell) -> Path:
        """Folder of the cell's files, named by a hash of its identity."""
        text = json.dumps(self.identity(cell), sort_keys=True)
        return self.work / "cells" / hashlib.sha256(text.encode()).hexdigest()[:16]
