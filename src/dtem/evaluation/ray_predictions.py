"""Predictions by Ray Data, on this machine or a cluster, into a folder of Parquet files.

Tasks decode and preprocess files anywhere in the cluster, actors hold one model each, and Ray repeats what a lost
worker had.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dtem.data.loader import decode
from dtem.data.sources import EXTENSIONS, SCHEMES
from dtem.data.transforms import Transform
from dtem.errors import DtemError, first_line, require
from dtem.evaluation.prediction_files import batch_rows, prediction_row, prediction_table

LOCAL = "local"
"""The address of a Ray that is started on this machine, for this run alone."""
Forward = Callable[[torch.Tensor], torch.Tensor]


def check_places(data: str, out: str) -> None:
    """Refuse data that is no folder, and a place that holds something already. URLs are left to Ray."""
    if data.partition(":")[0] in SCHEMES:
        raise DtemError(f"data = {data!r}: Ray reads folders, local or s3://…, gs://…; leave ray out for other sources")
    if "://" not in data and not os.path.isdir(data):
        raise DtemError(f"there is no folder {data}")
    if "://" not in out and os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise DtemError(f"out = {out!r} is there already, and Ray writes a new folder: choose another, or remove it")


def predict_on_ray(
    model: nn.Module,
    forward_of: Callable[[nn.Module], Forward],
    transform: Transform,
    shape: tuple[int, ...],
    data: str,
    out: str,
    *,
    address: str,
    actors: int,
    gpu: bool,
    dtype: torch.dtype | None,
    top: int,
    labels: Sequence[str] | None,
    batch_size: int,
    limit: int | None,
    progress: bool,
) -> tuple[int, dict[str, str]]:
    """Number of images that were predicted, and why some could not be read, by name.

    Args:
        model: a classifier in eval mode; it is sent to every actor.
        forward_of: makes of it, in an actor, what is run: images -> logits.
        transform: preprocessing of one image.
        shape: of a preprocessed image: channels, height, width.
        data: a folder, or a URL.
        out: the folder or URL to write.
        address: of a running cluster, or `LOCAL`.
        actors: models at work at the same time, each on one CPU core, or with `gpu` on one GPU.
        gpu: whether they run on CUDA.
        dtype: type of autocast.
        top: number of classes per image.
        labels: names of the classes.
        batch_size: images per forward.
        limit: predict only this many images.
        progress: show Ray's progress bars.
    """
    ray, _ = require("ray", "ray"), require("ray.data", "ray")
    with _connected(ray, address, actors):
        ray.data.DataContext.get_current().enable_progress_bars = progress
        files = ray.data.read_binary_files(data, include_paths=True, file_extensions=list(EXTENSIONS))
        if limit is not None:
            files = files.limit(limit)
        root = f"{data.partition('://')[2] if '://' in data else os.path.abspath(data)}/"
        settings = (ray.put(model), forward_of, gpu, dtype, top, labels)
        decoded = files.map_batches(
            decode_batch, fn_kwargs={"transform": transform, "root": root, "shape": shape}, batch_size=batch_size
        )
        predicted = decoded.map_batches(
            Predictor,
            fn_constructor_args=settings,
            batch_size=batch_size,
            num_cpus=None if gpu else 1,
            num_gpus=1 if gpu else None,
            concurrency=actors,
        )
        try:
            predicted.write_parquet(out)
            errors = ray.data.read_parquet(out, columns=["name", "error"])
            unreadable = {row["name"]: row["error"] for row in errors.filter(_has_error).take_all()}
            return errors.count(), unreadable
        except DtemError:
            raise
        except Exception as error:  # Ray raises errors of every kind, with the trace of a worker
            raise DtemError(f"Ray did not finish: {_reason(error)}") from error


@contextmanager
def _connected(ray: Any, address: str, actors: int) -> Iterator[None]:
    """Ray at `address`, for the time of the block; one that the user has started stays."""
    if ray.is_initialized():
        yield
        return
    try:
        if address == LOCAL:
            cores = max(os.cpu_count() or 1, actors + 1)  # one for the tasks that decode
            ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False)
        else:
            ray.init(address=address, log_to_driver=False)
    except Exception as error:  # a wrong address raises errors of every kind
        raise DtemError(
            f"Ray cannot be reached at {address!r} ({_reason(error)}); {LOCAL!r} starts one here"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _has_error(row: Mapping[str, Any]) -> bool:
    return row["error"] is not None


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def decode_batch(
    batch: Mapping[str, Any], transform: Transform, root: str, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Files -> names, pixels, and why some cannot be read. Those have pixels of zeros."""
    pixels = np.zeros((len(batch["bytes"]), *shape), np.float32)
    errors = [""] * len(pixels)
    for index, content in enumerate(batch["bytes"]):
        try:
            pixels[index] = transform(decode(bytes(content))).numpy()
        except Exception as error:  # an image that cannot be read is a row with the reason
            errors[index] = first_line(error)
    names = [str(path).removeprefix(root) for path in batch["path"]]
    return {"name": np.array(names), "pixels": pixels, "error": np.array(errors)}


class Predictor:
    """An actor with one model: pixels -> rows."""

    def __init__(
        self,
        model: Any,
        forward_of: Callable[[nn.Module], Forward],
        gpu: bool,
        dtype: torch.dtype | None,
        top: int,
        labels: Sequence[str] | None,
    ) -> None:
        import ray

        self.device, self.dtype = torch.device("cuda" if gpu else "cpu"), dtype
        self.top, self.labels = top, labels
        self.forward = forward_of(ray.get(model).to(self.device))

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """A table of `prediction_files.COLUMNS`; the place in a dataset and the label are not known."""
        names = [f"\t{name}" for name in batch["name"]]
        is_read = np.array([not error for error in batch["error"]])
        rows = [
            prediction_row(name, error=str(error)) for name, error in zip(names, batch["error"], strict=True) if error
        ]
        if is_read.any():
            images = torch.from_numpy(batch["pixels"][is_read]).to(self.device)
            with torch.inference_mode(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                logits = self.forward(images).float().cpu()
            read = [name for name, each in zip(names, is_read, strict=True) if each]
            rows += batch_rows(logits, torch.full((len(read),), -1), read, self.top, self.labels)
        return prediction_table(rows)
