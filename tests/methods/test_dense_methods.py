"""ToMe and DTEM where every patch must be there at the end: what is merged, what is relaxed, and what learns."""

import pytest
import torch
from torch import Tensor

from dtem import ops
from dtem.errors import DtemError
from dtem.methods.dense import DenseDtem, DenseTome, Grouped
from dtem.types import HostSpec

HOST = HostSpec("tiny", "segmenter", depth=2, width=16, heads=2, head_dim=8, prefix=1, patches=40, pooling="dense")
R = 14


def dtem(**options: object) -> DenseDtem:
    method = DenseDtem.create(HOST, options)
    method.init_from_keys([])
    return method


@pytest.fixture
def h() -> Tensor:
    return torch.randn(2, 41, 16)


def test_tome_goes_by_the_input_itself(h: Tensor) -> None:
    grouped = DenseTome.create(HOST, {}).group(0, h, R)
    matching = ops.match(h, R, 1)
    assert torch.equal(grouped.matching.merged, matching.merged)
    assert grouped.x.shape == (2, 41 - R, 16)
    for image in range(2):  # plain means: every component starts with sizes 1
        source = matching.source[image]
        for token in range(41 - R):
            members = h[image, source == token]
            torch.testing.assert_close(grouped.x[image, token], members.mean(0))
            assert grouped.size[image, token] == len(members)
    assert torch.equal(grouped.x[:, 0], h[:, 0]), "prefix tokens are safe"


def test_what_was_merged_gets_a_copy(h: Tensor) -> None:
    method = DenseTome.create(HOST, {})
    grouped = method.group(0, h, R)
    y = torch.randn_like(grouped.x)
    back = method.ungroup(y, grouped)
    for image in range(2):
        for token, place in enumerate(grouped.matching.source[image].tolist()):
            assert torch.equal(back[image, token], y[image, place])
    assert torch.equal(method.ungroup(h, method.group(1, h, 0)), h)


def test_start_keeps_cosines_roughly_and_components_apart(h: Tensor) -> None:
    method = dtem()
    assert len(method.embeddings) == 4
    weights = [embedding.affine.weight for embedding in method.embeddings]
    for weight in weights:
        torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=0, atol=1e-5)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], dtem().embeddings[0].affine.weight), "the same in every run"
    assert not torch.equal(weights[0], dtem(seed=1).embeddings[0].affine.weight)
    same = dtem(dim=16).group(0, h, R)  # as wide as the input: no projection is lost, so this is ToMe
    assert torch.equal(same.matching.source, DenseTome.create(HOST, {}).group(0, h, R).matching.source)


@pytest.mark.parametrize("relaxed", [4, 64])
def test_relaxed_merging_tends_to_hard_merging(h: Tensor, relaxed: int) -> None:
    """τ → 0: what a component sees, by size, and what comes back."""
    h = h.double()
    method = dtem(temperature=1e-4, relaxed=relaxed).double()
    hard = method.group(0, h, R)
    method.soft = True
    soft = method.group(0, h, R)
    assert soft.matching.merged.shape[1] == max(0, R - relaxed)
    assert soft.x.shape[1] == 41 - max(0, R - relaxed), "what is relaxed stays"
    for image in range(2):
        here = soft.size[image] > 0.5
        assert int(here.sum()) == 41 - R
        torch.testing.assert_close(soft.x[image][here], hard.x[image], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(soft.size[image][here].double(), hard.size[image].double())
    answer = torch.randn(16, 16, dtype=torch.float64)
    torch.testing.assert_close(
        method.ungroup(soft.x @ answer, soft), method.ungroup(hard.x @ answer, hard), rtol=1e-5, atol=1e-5
    )


def test_weights_of_attention(h: Tensor) -> None:
    grouped = DenseTome.create(HOST, {}).group(0, h, R)
    torch.testing.assert_close(DenseTome.create(HOST, {}).bias_of(grouped), grouped.size.log())
    plain = DenseTome.create(HOST, {"proportional": False})
    assert plain.bias_of(grouped) is None
    assert plain.bias_of(Grouped(h)) is None
    method = dtem(proportional=False, relaxed=4)
    method.soft = True
    soft = method.group(0, h, R)
    bias = method.bias_of(soft)
    assert (bias <= 0).all(), "nobody counts more than once"
    assert bias.min() < -0.1, "and one that gave itself away counts less"
    assert bias.isfinite().all()


def test_fisher_components_merge_as_at_inference_or_return_candidates(h: Tensor) -> None:
    method, plain = dtem(fisher=True), dtem()
    method.soft = True
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        grouped = method.group(0, h, R)
        seen.add(grouped.candidates is None)
        if grouped.candidates is None:
            hard = plain.group(0, h, R)
            assert torch.equal(grouped.x, hard.x)
            assert torch.equal(grouped.size, hard.size)
            continue
        assert torch.equal(grouped.x, h), "nothing is merged where merges are fisher"
        assert grouped.size is None
        edges, x, size, perturbation, prefix = grouped.candidates
        assert (edges.shape, prefix) == ((2, 20, 20), 1)
        assert torch.equal(edges, ops.soft_group(ops.cosine(method.metric(0, h), 1), R))
        assert torch.equal(x, h)
        assert size.eq(1).all()
        change = torch.randn_like(h)
        (slope,) = torch.autograd.grad((method.ungroup(grouped.x, grouped) * change).sum(), perturbation)
        torch.testing.assert_close(slope, change)
    assert seen == {True, False}


def test_gradients_reach_embeddings_and_not_their_input(h: Tensor) -> None:
    method = dtem(relaxed=4)
    method.soft = True
    h.requires_grad_()
    grouped = method.group(2, h, R)
    size = torch.autograd.grad(grouped.size.pow(2).sum(), [h, *method.embeddings[2].parameters()], allow_unused=True)
    assert size[0] is None or not size[0].any(), "embed(h.detach())"
    assert size[1].abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fisher": 1}, "fisher = 1 must be True or False"),
        ({"relaxed": 0}, "relaxed = 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"dim": -1}, "dim"),
        ({"hidden": (0,)}, "hidden"),
        ({"moon": 1}, "no option 'moon'"),
    ],
)
def test_refusals(options: dict[str, object], said: str) -> None:
    with pytest.raises(DtemError, match=said):
        dtem(**options)
