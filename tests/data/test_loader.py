import pickle
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtem.data.loader import Batch, Loader, decode
from dtem.data.sources import Record, Source, open_source
from dtem.errors import DtemError

from .photo_folders import class_folders, encoded, red


class Dice:
    """A transform that shows which picture it got, and a random number from each of the three generators."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        thrown = [red(image), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(thrown).reshape(1, 2, 2)


class Memory(Source):
    """Pictures 0 to n - 1 with their number as label; counts what was read."""

    def __init__(self, count: int, streamed: bool = False, broken: frozenset[int] = frozenset()) -> None:
        super().__init__("memory", True, None if streamed else count)
        self.count = count
        self.broken = broken
        self.reads: list[int] = []

    def read(self, index: int) -> Record:
        self.reads.append(index)
        return Record(b"broken" if index in self.broken else encoded(index), index, f"{index}.png")

    def stream(self, seed: int | None, epoch: int) -> Iterator[Record]:
        order = range(self.count) if seed is None else np.random.default_rng([seed, epoch]).permutation(self.count)
        return (self.read(int(index)) for index in order)

    def name(self, index: int) -> str:
        return f"{index}.png"


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.names == b.names
        for a, b in zip(one, other, strict=True)
    )


def labels(batches: list[Batch]) -> list[list[int]]:
    return [batch.labels.tolist() for batch in batches]


def loader(source: Source, batch: int = 3, **options: Any) -> Loader:
    return Loader(source, Dice(), batch, **options)


SHUFFLED = {"shuffle": True, "seed": 5}


def test_batches_in_order() -> None:
    batches = list(loader(Memory(7)).epoch(0))
    assert labels(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[0].images.shape == (3, 1, 2, 2)
    assert batches[0].labels.dtype == torch.int64
    assert batches[2].names == ["6.png"]
    assert [batch.images[:, 0, 0, 0].tolist() for batch in batches] == labels(batches)


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_steps(drop_last: bool, steps: int) -> None:
    for streamed in (False, True):
        found = loader(Memory(7, streamed), drop_last=drop_last)
        assert found.steps == (None if streamed else steps)
        assert len(list(found.epoch(0))) == steps


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return labels(list(loader(Memory(20), seed=seed, shuffle=True).epoch(epoch)))

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert order(0, 1) == orders[1]
    assert all(sorted(chain.from_iterable(found)) == list(range(20)) for found in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_augmentation_is_a_function_of_seed_epoch_and_position() -> None:
    def thrown(seed: int, epoch: int, batch: int = 3) -> torch.Tensor:
        found = loader(Memory(6), batch, seed=seed).epoch(epoch)
        return torch.cat([batch.images.flatten(1)[:, 1:] for batch in found])

    first = thrown(0, 0)
    assert first.unique().numel() == 18
    assert torch.equal(first, thrown(0, 0, batch=2))
    for other in (thrown(0, 1), thrown(1, 0)):
        assert not (first == other).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_generators_are_left_alone(workers: int) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    list(loader(Memory(4), workers=workers, **SHUFFLED).epoch(0))
    assert draw() == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_workers_change_nothing(streamed: bool) -> None:
    source = Memory(11, streamed, frozenset({4}))
    alone, helped = loader(source, 2, **SHUFFLED), loader(source, 2, workers=2, **SHUFFLED)
    assert same(list(alone.epoch(1)), list(helped.epoch(1)))
    assert alone.skipped.keys() == helped.skipped.keys() == {"4.png"}
    assert same(list(alone.epoch(1, 3)), list(helped.epoch(1, 3)))


@pytest.mark.parametrize("streamed", [False, True])
def test_resuming_goes_on_with_the_same_batches(streamed: bool) -> None:
    epoch = list(loader(Memory(11, streamed), **SHUFFLED).epoch(2))
    for start in range(5):
        assert same(list(loader(Memory(11, streamed), **SHUFFLED).epoch(2, start)), epoch[start:])


def test_resuming_reads_nothing_of_what_was_done() -> None:
    source = Memory(11)
    resumed = list(loader(source, **SHUFFLED).epoch(2, 3))
    assert labels(resumed) == [source.reads]
    assert len(source.reads) == 2


def test_what_is_no_image_is_said_so() -> None:
    with pytest.raises(DtemError, match=r"^not an image file$"):
        decode(b"no image")


def test_resuming_a_stream_does_not_decode_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr("dtem.data.loader.decode", lambda image: decoded.append(red(image)) or decode(image))
    assert labels(list(loader(Memory(8, streamed=True)).epoch(0, 2))) == [decoded] == [[6, 7]]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("count", [12, 11, 10, 9])
def test_two_ranks_see_what_one_sees_with_twice_the_batch(streamed: bool, count: int) -> None:
    source = Memory(count, streamed)
    one = list(loader(source, 4, **SHUFFLED).epoch(1))
    ranks = [list(loader(source, 2, rank=rank, world=2, **SHUFFLED).epoch(1)) for rank in range(2)]
    for step, batch in enumerate(one):
        parts = [rank[step] for rank in ranks if step < len(rank)]
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
        assert [name for part in parts for name in part.names] == batch.names
        if step < count // 4:
            assert [len(part.names) for part in parts] == [2, 2]


def test_a_bad_image_stops_the_run_by_name() -> None:
    for workers in (0, 1):
        stopping = loader(Memory(5, broken=frozenset({4})), on_decode_error="stop", workers=workers, **SHUFFLED)
        with pytest.raises(DtemError, match=r"^4\.png cannot be read: not an image file"):
            list(stopping.epoch(0))


def test_a_bad_image_is_left_out_of_an_evaluation() -> None:
    skipping = loader(Memory(7, broken=frozenset({1, 6})))
    assert labels(list(skipping.epoch(0))) == [[0, 2], [3, 4, 5]]
    assert skipping.skipped.keys() == {"1.png", "6.png"}
    assert "not an image file" in skipping.skipped["6.png"]


def test_a_bad_image_is_replaced_in_training_by_the_next_position() -> None:
    epoch = list(chain.from_iterable(labels(list(loader(Memory(6), 2, **SHUFFLED).epoch(0)))))
    broken = epoch[1], epoch[2], epoch[5]
    skipping = loader(Memory(6, broken=frozenset(broken)), 2, **SHUFFLED)
    expected = [[epoch[0], epoch[3]], [epoch[3], epoch[3]], [epoch[4], epoch[0]]]
    batches = list(skipping.epoch(0))
    assert labels(batches) == expected
    assert skipping.skipped.keys() == {f"{number}.png" for number in broken}
    assert not torch.equal(batches[1].images[0], batches[1].images[1])  # each has its own augmentation
    assert same(list(skipping.epoch(0, 1)), batches[1:])


def test_a_bad_image_of_a_stream_is_replaced_from_its_batch() -> None:
    epoch = labels(list(loader(Memory(6, streamed=True), **SHUFFLED).epoch(0)))
    (first, second, third), (fourth, fifth, sixth) = epoch
    source = Memory(6, streamed=True, broken=frozenset({first, sixth}))
    assert labels(list(loader(source, **SHUFFLED).epoch(0))) == [[second, second, third], [fourth, fifth, fourth]]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_but_bad_images_is_an_error(streamed: bool, shuffle: bool) -> None:
    source = Memory(5, streamed, frozenset(range(5)))
    with pytest.raises(DtemError, match=r"could read none of them; the first, \d\.png: not an image file"):
        list(loader(source, shuffle=shuffle).epoch(0))


def test_unreadable_files_of_many_kinds(tmp_path: Path) -> None:
    class_folders(tmp_path, 6, ["0"])
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    noise.save(tmp_path / "0" / "001.png", "JPEG")
    content = (tmp_path / "0" / "001.png").read_bytes()
    (tmp_path / "0" / "000.png").write_bytes(b"")
    (tmp_path / "0" / "001.png").write_bytes(content[: len(content) * 3 // 4])  # cut off within the pixels
    source = open_source(str(tmp_path))
    (tmp_path / "0" / "002.png").unlink()  # gone since it was listed
    skipping = loader(source)
    assert [name for batch in skipping.epoch(0) for name in batch.names] == ["0/003.png", "0/004.png", "0/005.png"]
    assert list(skipping.skipped) == ["0/000.png", "0/001.png", "0/002.png"]
    assert "truncated" in skipping.skipped["0/001.png"]
    assert "No such file" in skipping.skipped["0/002.png"]


def test_an_error_of_the_transform_is_not_taken_for_a_bad_image() -> None:
    def fails(image: Image.Image) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(Loader(Memory(2), fails, 1).epoch(0))


def test_a_label_outside_the_head_is_found_before_the_first_step(tmp_path: Path) -> None:
    source = open_source(str(class_folders(tmp_path, 4, ["0", "9", "5"])))
    with pytest.raises(DtemError, match=r"9/001\.png has label 9, but the head has 9 classes \(0 to 8\)"):
        loader(source, num_classes=9)
    assert loader(source, num_classes=10).steps == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_label_outside_the_head_is_found_in_a_stream(workers: int) -> None:
    running = loader(Memory(6, streamed=True), num_classes=4, workers=workers).epoch(0)
    assert next(running).labels.tolist() == [0, 1, 2]
    with pytest.raises(DtemError, match=r"^4\.png has label 4, but the head has 4 classes"):
        next(running)


def test_images_without_labels(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encoded(number))
    batches = list(loader(open_source(str(tmp_path)), num_classes=3).epoch(0))
    assert labels(batches) == [[-1, -1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch_size = 0"),
        ({"workers": -1}, "workers = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"rank": 2, "world": 2}, "rank = 2"),
        ({"on_decode_error": "ignore"}, "on_decode_error = 'ignore'"),
        ({"batch": 4, "world": 2, "drop_last": True}, "holds 7 images, less than one step of 8"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DtemError, match=message):
        loader(Memory(7), **options)


def test_epochs_and_steps_are_counted_from_zero() -> None:
    for arguments in ((-1, 0), (0, -1)):
        with pytest.raises(DtemError, match="must be 0 or more"):
            next(loader(Memory(2)).epoch(*arguments))


def test_a_loader_can_be_sent_to_a_fresh_process(tmp_path: Path) -> None:
    """Where processes do not start as copies, everything that a worker needs is pickled."""
    epochs = loader(open_source(str(class_folders(tmp_path, 3))), **SHUFFLED)
    assert same(list(pickle.loads(pickle.dumps(epochs)).epoch(0)), list(epochs.epoch(0)))
