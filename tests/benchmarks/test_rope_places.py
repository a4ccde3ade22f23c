"""The positions that `benchmarks.rope_places` compares."""

import torch

from benchmarks.rope_places import larger_places
from dtem import ops


def test_the_larger_part_keeps_its_place() -> None:
    """By hand: token 0 goes into 1, tokens 2 and 4 into 5."""
    matching = ops.Matching(
        kept=torch.tensor([[1, 3, 5]]), merged=torch.tensor([[0, 2, 4]]), into=torch.tensor([[0, 2, 2]])
    )
    places = torch.arange(6.0).view(1, 6, 1).expand(-1, -1, 2)
    for sizes, expected in (
        ([1, 1, 1, 1, 1, 1], [1, 3, 5]),
        ([2, 1, 1, 1, 3, 2], [0, 3, 4]),
        ([1, 2, 5, 1, 3, 4], [1, 3, 2]),
    ):
        got = larger_places(places, torch.tensor([sizes]).float(), matching)
        assert got[0, :, 0].tolist() == expected
