"""k-NN accuracy of models without a classifier: each image is classified by its nearest labelled neighbours."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dtem.data.loader import Loader
from dtem.errors import DtemError
from dtem.progress import progress_bar
from dtem.tasks.running import Forward

NUM_NEIGHBOURS = 10
TEMPERATURE = 0.07
"""A neighbour at cosine s has exp(s / TEMPERATURE) votes."""
SMOOTHING = 1e-3
"""Part of the probability that is spread over all classes, so that a class without a neighbour is not impossible."""


def vote(
    queries: Float[Tensor, "b c"], bank: Float[Tensor, "n c"], labels: Int[Tensor, " n"], classes: int, k: int
) -> Float[Tensor, "b k"]:
    """Log-probabilities of the classes, by the k images of the bank whose features have the highest cosine."""
    cosine, nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).topk(min(k, len(bank)), dim=1)
    votes = queries.new_zeros(len(queries), classes)
    votes.scatter_add_(1, labels[nearest], (cosine / TEMPERATURE).softmax(dim=1))
    return ((1 - SMOOTHING) * votes + SMOOTHING / classes).log()


def as_classifiers(
    forwards: Mapping[str, Forward], loader: Loader, k: int, device: str, progress: bool
) -> dict[str, Forward]:
    """Models that give features as classifiers, each with a bank of its own features of the images of `loader`."""
    if k < 1:
        raise DtemError(f"num_neighbours = {k} must be 1 or more")
    length = loader.source.length
    with progress_bar(None if length is None else length * len(forwards), "k-NN bank", show=progress) as advance:
        return {name: _classifier(forward, loader, k, device, advance) for name, forward in forwards.items()}


def _classifier(forward: Forward, loader: Loader, k: int, device: str, advance: Callable[[int], object]) -> Forward:
    """Images -> log-probabilities. The bank goes through the same model, at the same r."""
    features, labels = [], []
    with torch.inference_mode():
        for batch in loader.epoch(0):
            features.append(forward(batch.images.to(device)).float())
            labels.append(batch.labels)
            advance(len(batch.names))
    if not features:
        raise DtemError("there are no neighbours: none of the knn images could be read")
    bank, bank_labels = torch.cat(features), torch.cat(labels).to(device)
    if (bank_labels < 0).any():
        raise DtemError("the knn images have no labels: sort them into one folder per class")
    classes = int(bank_labels.max()) + 1
    return lambda images: vote(forward(images).float(), bank, bank_labels, classes, k)
