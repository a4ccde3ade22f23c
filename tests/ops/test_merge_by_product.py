"""The merge that exported graphs hold, against loops and against the ordinary one."""

import oracles
import pytest
import torch

from dtem import ops
from dtem.ops.merging import merge_by_product


@pytest.mark.parametrize(("tokens", "prefix", "r"), [(17, 1, 8), (18, 2, 3), (16, 0, 8), (21, 5, 0)])
@pytest.mark.parametrize("sized", [True, False])
def test_it_is_the_weighted_mean(tokens: int, prefix: int, r: int, sized: bool) -> None:
    x, metric = torch.randn(3, tokens, 4, dtype=torch.float64), torch.randn(3, tokens, 5)
    metric[:, prefix + 1 :: 2] = metric[:, prefix + 1 : prefix + 2]  # one side alike: many join the same token
    size = torch.randint(1, 9, (3, tokens)).float() if sized else None
    matching = ops.match(metric, r, prefix)
    merged_x, sizes = merge_by_product(x, size, matching)
    for image in range(3):
        kept, merged = matching.kept[image].tolist(), matching.merged[image].tolist()
        partner = [kept[place] for place in matching.into[image].tolist()]
        own = torch.ones(tokens) if size is None else size[image]
        features, weights, _ = oracles.merge(x[image], own, kept, merged, partner)
        torch.testing.assert_close(merged_x[image], features, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sizes[image], weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_ordinary_merge(dtype: torch.dtype) -> None:
    x, size = torch.randn(2, 33, 8).to(dtype), torch.randint(1, 5, (2, 33)).float()
    matching = ops.match(x, 12, 1)
    ordinary, product = ops.merge(x, size, matching), merge_by_product(x, size, matching)
    near = 1e-6 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(product[0], ordinary[0], rtol=near, atol=near)
    assert torch.equal(product[1], ordinary[1])
    assert product[0].dtype == dtype
