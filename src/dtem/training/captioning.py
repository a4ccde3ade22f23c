"""What training asks of a task (`training.tasks`), answered for image captioning with GIT."""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtem.handle import Handle
from dtem.tasks.captioning import evaluate, metric
from dtem.tasks.captioning.data import Item, open_captions
from dtem.tasks.captioning.evaluate import Written
from dtem.tasks.captioning.loss import distill_loss, readings, task_loss
from dtem.tasks.classification.data import Batch, Loader, eval_transform
from dtem.tasks.classification.evaluate import evaluating
from dtem.training.config import TrainConfig
from dtem.training.tasks import READINGS, Forward, share_of
from dtem.types import DtemError

if TYPE_CHECKING:
    from accelerate import Accelerator

EVAL_BATCH = 16


class Captioning:
    """Images with captions; the likelihood of every word, or what the unmerged model says of the next one, or both.

    Images are resized to the model's square and nothing else. The best of a run is chosen by CIDEr, or by the loss
    where CIDEr needs what is not there (Java)."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, data_config: dict[str, Any], accelerator: "Accelerator"
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.tokenizer: Any = getattr(model, "tokenizer", None)
        if self.tokenizer is None:
            raise DtemError(
                f"{type(model).__name__} brings no tokenizer; load it with dtem.tasks.captioning.loading.load"
            )
        if not config.data:
            raise DtemError("there are no captions to train on: give them with --data, e.g. captions.json#train")
        self.source = open_captions(config.data)
        transform = eval_transform(data_config)
        ranks = {"rank": accelerator.process_index, "world": accelerator.num_processes, "workers": config.workers}
        self.loader = Loader(
            self.source,
            transform,
            share_of(config, accelerator.num_processes),
            seed=config.seed,
            shuffle=True,
            drop_last=True,
            bad=config.bad,
            **ranks,
        )
        self.eval_loader, self.missing = None, ""
        self.watched: list[Item] = []
        if config.eval_data:
            watched = open_captions(config.eval_data)
            self.watched = watched.items
            self.missing = metric.check().get("CIDEr", "")
            self.eval_loader = Loader(watched, transform, EVAL_BATCH, bad=config.bad, **ranks)

    def loss(self, batch: Batch, seed: int, student: Forward, teacher: Forward) -> Tensor:
        """The loss of one batch, or what it is made of where merges are priced. `teacher` is called only if the loss
        needs it, and before `student`."""
        config = self.config
        if config.options.get("priced"):
            return self.readings(batch, seed, student)
        images, ids, mask = self._read(batch, seed)
        taught = None if config.loss == "task" else _logits(teacher(ids, mask, None, images))
        logits = _logits(student(ids, mask, None, images))
        parts = []
        if config.loss != "distill":
            parts.append(task_loss(logits, ids, mask))
        if taught is not None:
            parts.append(distill_loss(logits, taught, mask, config.distill_temperature))
        return sum(parts[1:], parts[0])

    def readings(self, batch: Batch, seed: int, student: Forward) -> Tensor:
        """Random numbers read off the output of one batch."""
        images, ids, mask = self._read(batch, seed)
        return readings(_logits(student(ids, mask, None, images)), mask, READINGS, len(images))

    def _read(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Images, and the tokens of their captions with the mask of those that are there."""
        device = self.accelerator.device
        ids, mask = evaluate.read(self.tokenizer, self._drawn(batch, seed), self.config.style.longest, device)
        return batch.images.to(device, non_blocking=True), ids, mask

    def _drawn(self, batch: Batch, seed: int) -> list[str]:
        """Captions of every image, drawn without repetition as far as there are enough. First one of each image, then
        another of each: so GIT repeats images."""
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for index in batch.labels.tolist():
            captions = self.source.items[index].captions
            order = torch.randperm(len(captions), generator=generator).tolist()
            rows.append([captions[order[turn % len(order)]] for turn in range(self.config.style.captions)])
        return [row[turn] for turn in range(self.config.style.captions) for row in rows]

    def evaluate(self, handle: Handle) -> dict[str, Written]:
        """Captions and their scores by r, over all processes; nothing without evaluation data."""
        if self.eval_loader is None:
            return {}
        with evaluating(handle.model):
            ready = evaluate.at_rates(handle, self.config.eval_rates)
            found = evaluate.compete(ready, self.eval_loader, self.watched, self.config.style, self.accelerator.device)
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            found = {rate: evaluate.join(gather_object([part])) for rate, part in found.items()}
        return {rate: evaluate.scored(part, self.watched) for rate, part in found.items()}

    def score(self, found: Mapping[str, Written]) -> float:
        """Minus the mean CIDEr, or the loss where that cannot be had."""
        values = [part.loss if self.missing else -_number(part, "CIDEr") for part in found.values()]
        return sum(values) / len(values)

    def metrics(self, part: Written) -> dict[str, float]:
        assert part.scores is not None
        numbers = {name: value for name, value in part.scores.corpus.items() if isinstance(value, float)}
        return {"CIDEr": numbers["CIDEr"], **numbers, "loss": part.loss} if numbers else {"loss": part.loss}

    def brief(self, part: Written) -> str:
        if self.missing:
            return f"loss {part.loss:.4f} (CIDEr {self.missing}: {metric.HELP[self.missing]})"
        return f"CIDEr {_number(part, 'CIDEr'):.1f}, BLEU-4 {_number(part, 'BLEU-4'):.1f} ({part.loss:.4f})"

    def describe(self) -> dict[str, str]:
        """What the adapter should say about its data: the names of the files, where there are not too many."""
        names = self.source.names
        if len(names) > self.config.list_files:
            return {}
        return {"trained_on": json.dumps(sorted({PurePath(name).name for name in names}))}


def _logits(said: Any) -> Tensor:
    """GIT answers with more than its logits."""
    logits: Tensor = said.logits
    return logits


def _number(part: Written, name: str) -> float:
    assert part.scores is not None
    value = part.scores.corpus[name]
    assert isinstance(value, float)
    return value
