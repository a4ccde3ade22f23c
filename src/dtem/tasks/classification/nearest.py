"""Accuracy without a classifier: each image is judged by its nearest neighbours among labelled ones."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.types import DtemError

if TYPE_CHECKING:
    from dtem.tasks.classification.data import Loader

NEIGHBOURS = 10
TEMPERATURE = 0.07
"""A neighbour at cosine s has exp(s / TEMPERATURE) votes."""
UNSURE = 1e-3
"""Part of the probability that is spread over all classes: one without a neighbour is unlikely, not impossible."""

Forward = Callable[[Tensor], Tensor]


def vote(
    queries: Float[Tensor, "b c"], bank: Float[Tensor, "n c"], labels: Int[Tensor, " n"], classes: int, k: int
) -> Float[Tensor, "b k"]:
    """Log-probabilities of the classes, by the k images of the bank whose features have the highest cosine."""
    cosine, nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).topk(min(k, len(bank)), dim=1)
    votes = queries.new_zeros(len(queries), classes)
    votes.scatter_add_(1, labels[nearest], (cosine / TEMPERATURE).softmax(dim=1))
    return ((1 - UNSURE) * votes + UNSURE / classes).log()


class Nearest:
    """A model that gives features, as a classifier. The bank goes through the same model, merged as it is."""

    def __init__(self, forward: Forward, loader: "Loader", k: int = NEIGHBOURS, device: str | torch.device = "cpu"):
        self.forward, self.k = forward, k
        features, labels = [], []
        with torch.inference_mode():
            for batch in loader.epoch(0):
                features.append(forward(batch.images.to(device)).float())
                labels.append(batch.labels)
        if not features:
            raise DtemError("there are no neighbours: the bank held no image that could be read")
        self.bank, self.labels = torch.cat(features), torch.cat(labels).to(device)
        if (self.labels < 0).any():
            raise DtemError("the bank has images without a label: sort them into one folder per class")
        self.classes = int(self.labels.max()) + 1

    def __call__(self, images: Tensor) -> Tensor:
        return vote(self.forward(images).float(), self.bank, self.labels, self.classes, self.k)
