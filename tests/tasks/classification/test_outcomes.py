"""Per-image outcomes: counted by hand, kept whole, paired with the right numbers."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from dtem.errors import DtemError
from dtem.tasks.classification.outcomes import Outcomes, paired
from dtem.tasks.outcome_files import pool


def outcomes(right: str, losses: list[float] | None = None, names: str | None = None) -> Outcomes:
    """One image per letter: 1 right, 5 among the five, 0 wrong. The label is 3, other classes are 10, 11, …"""
    predicted = {"1": [3, 10, 11, 12, 13], "5": [10, 11, 12, 13, 3], "0": [10, 11, 12, 13, 14]}
    n = len(right)
    return Outcomes(
        list(names or "abcdefghijklmnopqrstuvwxyz"[:n]),
        torch.full((n,), 3),
        torch.tensor([predicted[letter] for letter in right]),
        torch.tensor(losses or [1.0] * n),
    )


def random_outcomes(n: int, accuracy: float, seed: int) -> Outcomes:
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.arange(100, 105).repeat(n, 1)
    predicted[:, 0] = torch.where(torch.rand(n, generator=generator) < accuracy, 3, 100)
    loss = torch.rand(n, generator=generator) * (1 + seed)
    return Outcomes([f"{i}.jpg" for i in range(n)], torch.full((n,), 3), predicted, loss)


def test_counted_by_hand() -> None:
    measured = outcomes("1150", [0.5, 1.0, 1.5, 3.0])
    assert len(measured) == 4
    assert (measured.top1, measured.top5, measured.mean_loss) == (50, 75, 1.5)
    assert measured.correct.tolist() == [True, True, False, False]


def test_saved_and_read_again(tmp_path) -> None:
    measured = outcomes("1150", [0.5, 1.0, 1.5, 3.0], "äbcd")
    measured.save(tmp_path / "a.safetensors")
    again = Outcomes.load(tmp_path / "a.safetensors")
    assert again.names == measured.names
    for name in ("labels", "predicted", "loss"):
        assert torch.equal(getattr(again, name), getattr(measured, name))
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_save_keeps_what_was_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    outcomes("11").save(path)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DtemError, match="No space left"):
        outcomes("00").save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def whole() -> dict[str, torch.Tensor]:
    return {"labels": torch.zeros(1).long(), "predicted": torch.zeros(1, 5).long(), "loss": torch.zeros(1)}


GOOD = {"format": 1, "names": ["a"]}


@pytest.mark.parametrize(
    ("tensors", "header", "says"),
    [
        (whole(), None, "not a file of outcomes"),
        (whole(), [1], "not a file of outcomes"),
        (whole(), {**GOOD, "format": 2}, "format 2"),
        (whole(), {"format": 1}, "damaged"),
        (whole(), {"format": 1, "names": [7]}, "damaged"),
        (whole(), {"format": 1, "names": ["a", "b"]}, "labels of shape"),
        ({**whole(), "more": torch.zeros(1)}, GOOD, "damaged"),
        ({**whole(), "labels": torch.zeros(1)}, GOOD, "damaged"),
        ({**whole(), "predicted": torch.zeros(1, 4).long()}, GOOD, "predicted of shape"),
        ({**whole(), "loss": torch.tensor([math.nan])}, GOOD, "not finite"),
    ],
)
def test_other_files_are_refused_by_name(tensors, header, says: str, tmp_path) -> None:
    path = tmp_path / "other.safetensors"
    save_file(tensors, path, None if header is None else {"dtem-outcomes": json.dumps(header)})
    with pytest.raises(DtemError, match=says) as error:
        Outcomes.load(path)
    assert "other.safetensors" in str(error.value)


def test_the_good_header_is_good(tmp_path) -> None:
    save_file(whole(), tmp_path / "a.safetensors", {"dtem-outcomes": json.dumps(GOOD)})
    assert Outcomes.load(tmp_path / "a.safetensors").names == ["a"]


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_damaged_files_are_refused_by_name(kept: int, tmp_path) -> None:
    path = tmp_path / "half.safetensors"
    outcomes("1150").save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DtemError, match=r"half\.safetensors"):
        Outcomes.load(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(DtemError, match=r"nowhere\.safetensors"):
        Outcomes.load(tmp_path / "nowhere.safetensors")


def test_what_cannot_be_outcomes() -> None:
    with pytest.raises(DtemError, match="'a' occurs more than once"):
        outcomes("10", names="aa")
    with pytest.raises(DtemError, match="no outcomes"):
        Outcomes([], torch.zeros(0).long(), torch.zeros(0, 5).long(), torch.zeros(0))
    with pytest.raises(DtemError, match="'b' is not finite"):
        outcomes("10", [1.0, math.inf])


def test_paired_by_hand() -> None:
    # per image b - a: +1, 0, -1, +1 points; mean 25, sample variance (0.75² + 0.25² + 1.25² + 0.75²)/3 = 0.91667
    pair = paired(outcomes("0110", [1.0, 1.0, 1.0, 2.0]), outcomes("1101", [0.5, 1.0, 1.5, 1.0]))
    assert (pair.n, pair.only_a, pair.only_b) == (4, 1, 2)
    assert pair.top1.value == 25
    half = 1.959964 * 100 * math.sqrt(11 / 12) / 2
    assert pair.top1.low == pytest.approx(25 - half, abs=1e-3)
    assert pair.top1.high == pytest.approx(25 + half, abs=1e-3)
    # cross-entropy: -0.5, 0, 0.5, -1: mean -0.25, sample variance (0.0625 + 0.0625 + 0.5625 + 0.5625)/3
    assert pair.loss.value == pytest.approx(-0.25)
    assert pair.loss.high - pair.loss.value == pytest.approx(1.959964 * math.sqrt(1.25 / 3) / 2, abs=1e-6)
    assert pair.p == 1


def test_pairs_by_name_whatever_the_order_and_on_common_images_only() -> None:
    a = outcomes("110x"[:3] + "1", [1.0, 2.0, 3.0, 9.0], "abcx")
    b = outcomes("0101", [7.0, 3.5, 2.0, 1.0], "ycba")
    pair = paired(a, b)  # a: 1, 2, 3 on a b c; b: 1, 2, 3.5 on them; right: a 1 1 0, b 1 0 1
    assert (pair.n, pair.only_a, pair.only_b) == (3, 1, 1)
    assert pair.top1.value == 0
    assert pair.loss.value == pytest.approx(0.5 / 3)


def test_swapping_turns_the_sign() -> None:
    a, b = random_outcomes(300, 0.7, 1), random_outcomes(300, 0.8, 2)
    one, other = paired(a, b), paired(b, a)
    assert one.top1.value > 0
    assert other.top1.value == -one.top1.value
    assert (other.top1.low, other.top1.high) == pytest.approx((-one.top1.high, -one.top1.low))
    assert (other.only_a, other.only_b, other.p) == (one.only_b, one.only_a, one.p)


def test_a_model_does_not_differ_from_itself() -> None:
    a = random_outcomes(50, 0.7, 1)
    pair = paired(a, a)
    assert (pair.top1.value, pair.top1.low, pair.top1.high, pair.loss.value, pair.p) == (0, 0, 0, 0, 1)


def test_what_cannot_be_paired() -> None:
    with pytest.raises(DtemError, match="0 of the images are in both"):
        paired(outcomes("11", names="ab"), outcomes("11", names="cd"))
    with pytest.raises(DtemError, match="1 of the images"):
        paired(outcomes("11", names="ab"), outcomes("11", names="bc"))
    other = outcomes("11", names="ab")
    other.labels[1] = 4
    with pytest.raises(DtemError, match="'b' has label 3 in one and 4 in the other"):
        paired(outcomes("11", names="ab"), other)


def test_the_interval_is_that_of_a_bootstrap() -> None:
    a, b = random_outcomes(1000, 0.70, 1), random_outcomes(1000, 0.75, 2)
    pair = paired(a, b)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(1000, (4000, 1000), generator=generator)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    for interval, each in (
        (pair.top1, 100 * (b.correct.double() - a.correct.double())),
        (pair.loss, b.loss.double() - a.loss.double()),
    ):
        low, high = each[picks].mean(1).quantile(ends).tolist()
        width = high - low
        assert interval.low == pytest.approx(low, abs=0.05 * width)
        assert interval.high == pytest.approx(high, abs=0.05 * width)


def test_pooled_folds() -> None:
    pooled = pool([outcomes("10", [1.0, 2.0], "ab"), outcomes("115", [0.5, 0.5, 1.0], "cde")])
    assert pooled.names == list("abcde")
    assert (pooled.top1, pooled.top5, pooled.mean_loss) == pytest.approx((60, 80, 1))


def test_what_cannot_be_pooled() -> None:
    with pytest.raises(DtemError, match="'b' occurs more than once"):
        pool([outcomes("10", names="ab"), outcomes("10", names="bc")])
    with pytest.raises(DtemError, match="no outcomes to pool"):
        pool([])
