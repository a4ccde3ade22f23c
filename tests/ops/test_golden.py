"""Against what the published ToMe computed. A missing golden file fails; it is never skipped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dtem import ops, schedule

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "tome_merge.safetensors"
CASES = range(6)


def load(case: int) -> tuple[dict, dict[str, torch.Tensor]]:
    with safe_open(GOLDEN, framework="pt") as file:
        info = json.loads(file.metadata()["cases"])[case]
        names = ("metric", "x", "size", "merged_x", "merged_size", "source")
        return info, {name: file.get_tensor(f"case{case}.{name}") for name in names}


def test_the_file_holds_exactly_these_cases() -> None:
    with safe_open(GOLDEN, framework="pt") as file:
        assert [info["case"] for info in json.loads(file.metadata()["cases"])] == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_match_and_merge_are_tome(case: int) -> None:
    info, golden = load(case)
    prefix = info["class_token"] + info["distill_token"]
    (r,) = schedule.clamp([info["r"]], info["tokens"] - prefix)
    assert info["tokens"] - r == info["tokens_after"]

    matching = ops.match(golden["metric"], r, prefix)
    x, size = ops.merge(golden["x"], golden["size"].squeeze(-1), matching)
    source = matching.source
    if prefix == 0:
        # ToMe leaves kept A tokens in score order here. Ours, in index order, must be a permutation of its output
        # that is the same for features, sizes and sources.
        place = torch.full_like(matching.kept, -1)
        place.scatter_(1, golden["source"].long(), source)  # ToMe's output position -> ours
        assert place.sort(dim=1).values.tolist() == [list(range(x.shape[1]))] * x.shape[0]
        x, size = ops.take(x, place), size.gather(1, place)
        source = place.argsort(dim=1).gather(1, source)

    assert source.tolist() == golden["source"].tolist()
    torch.testing.assert_close(x, golden["merged_x"], rtol=0, atol=1e-12)
    torch.testing.assert_close(size, golden["merged_size"].squeeze(-1), rtol=0, atol=1e-12)


def test_case_without_prefix_needs_the_reordering() -> None:
    """The exception above must not hide anything: all other cases are met in order."""
    prefixes = [load(case)[0]["class_token"] + load(case)[0]["distill_token"] for case in CASES]
    assert [case for case, prefix in zip(CASES, prefixes, strict=True) if prefix == 0] == [3]
