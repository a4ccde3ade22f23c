"""Density peaks where the answer is plain; `tests/methods/test_bat.py` has them against loops."""

import pytest
import torch

from dtem import ops
from dtem.errors import DtemError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("far", [1.0, 1e3])
def test_clouds_apart_are_the_clusters(dtype, far):
    """However far apart; no distance is lost in what all tokens share."""
    cloud = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 1, 2])
    centre = far * torch.eye(3, 16) + 50.0
    x = (centre[cloud] + 0.01 * torch.randn(2, 12, 16)).to(dtype)
    labels = ops.density_peaks(x, 3, neighbours=3)
    for row in labels:
        assert sorted({(a, b) for a, b in zip(row.tolist(), cloud.tolist(), strict=True)}) == sorted(
            {(row[cloud.tolist().index(c)].item(), c) for c in range(3)}
        )
        assert row.unique().tolist() == [0, 1, 2]


def test_twins_leave_no_cluster_empty():
    x = torch.randn(2, 3, 5).repeat_interleave(6, dim=1)
    for clusters in (1, 3, 7, 18):
        for row in ops.density_peaks(x, clusters):
            assert row.unique().tolist() == list(range(clusters))


def test_as_many_clusters_as_tokens():
    assert ops.density_peaks(torch.randn(1, 6, 4), 6).tolist() == [list(range(6))]


@pytest.mark.parametrize(("clusters", "neighbours"), [(0, 5), (7, 5), (2, 0)])
def test_what_cannot_be_is_refused(clusters, neighbours):
    with pytest.raises(DtemError):
        ops.density_peaks(torch.randn(1, 6, 4), clusters, neighbours)
