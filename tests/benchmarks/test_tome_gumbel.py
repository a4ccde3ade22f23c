"""The Gumbel-softmax relaxation against loops, its noise, and what it leaves as it is in DTEM."""

import math

import pytest
import torch

import dtem
from benchmarks.reproduce.tome_gumbel import gumbel_group
from contract.hosts import fresh, gradients, images, patched
from dtem import ops

SHARP = {"temperature": 0.1, "scale": 0.1}
BLUNT = {"temperature": 1.0, "scale": 0.5}


def written_out(similarity, r, temperature, scale, candidates, noise):
    """Edges of one image, entry by entry; `noise` is a matrix of standard Gumbel numbers."""
    rows = similarity.tolist()
    edges = torch.zeros_like(similarity)
    for i in sorted(range(len(rows)), key=lambda i: (-max(rows[i]), i))[:r]:
        best = sorted(range(len(rows[i])), key=lambda j, i=i: (-rows[i][j], j))[:candidates]
        power = {j: math.exp((rows[i][j] / scale + float(noise[i, j])) / temperature) for j in best}
        for j in best:
            edges[i, j] = power[j] / sum(power.values())
    return edges


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("candidates", [None, 3])
@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("settings", [SHARP, BLUNT], ids=["sharp", "blunt"])
def test_edges_are_those_written_out(settings, noise, candidates, batch):
    similarity = 2 * torch.rand(batch, 7, 6, dtype=torch.float64) - 1
    torch.manual_seed(5)
    edges = gumbel_group(similarity, 4, **settings, candidates=candidates, noise=noise)
    torch.manual_seed(5)
    drawn = -torch.empty(batch, 7, 6, dtype=torch.float64).exponential_().log() if noise else torch.zeros(batch, 7, 6)
    for image, got, gumbel in zip(similarity, edges, drawn, strict=True):
        expected = written_out(image, 4, **settings, candidates=candidates, noise=gumbel)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_partners_are_drawn_by_their_odds():
    """The largest entry of a row is partner j with probability softmax(S)_j, whatever the temperature."""
    similarity = torch.tensor([[[0.1, 0.0, -0.05]]]).expand(20_000, 1, 3)
    edges = gumbel_group(similarity, 1, temperature=0.5, scale=0.1)
    counts = edges[:, 0].argmax(dim=1).bincount(minlength=3) / 20_000
    torch.testing.assert_close(counts, (similarity[0, 0] / 0.1).softmax(dim=0), rtol=0, atol=0.02)


def test_r_rows_give_all_they_have_and_the_others_nothing():
    row_sums = gumbel_group(torch.rand(3, 8, 8), 5).sum(dim=2)
    torch.testing.assert_close(row_sums.sort(dim=1).values, torch.tensor([0.0] * 3 + [1.0] * 5).expand(3, 8))
    assert gumbel_group(torch.rand(3, 8, 8), 0).abs().max() == 0


def test_cold_and_without_noise_it_is_hard_matching():
    z = torch.randn(2, 17, 8, dtype=torch.float64)
    matching = ops.match(z, 5, prefix=1)
    edges = gumbel_group(ops.cosine(z, 1), 5, temperature=1e-4, scale=1.0, noise=False)
    for image in range(2):
        wanted = torch.zeros(8, 8, dtype=torch.float64)
        for token, into in zip(matching.merged[image], matching.into[image], strict=True):
            wanted[token // 2 - 1, into - (17 - 5 - 8)] = 1.0  # A: 2, 4, … 16; B: 1, 3, … 15, last in the output
        torch.testing.assert_close(edges[image], wanted, rtol=0, atol=1e-6)


def test_gradients_are_slopes():
    similarity = (2 * torch.rand(2, 5, 4, dtype=torch.float64) - 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: gumbel_group(s, 3, 1.0, 1.0, noise=False), similarity)


@pytest.mark.parametrize("name", ["deit", "distilled", "mae", "qk_norm"])
def test_hard_is_dtem(name):
    model, other = patched(name, "tome_gumbel")[0], patched(name, "dtem")[0]
    with torch.no_grad():
        assert torch.equal(model(images(name)), other(images(name)))


def test_noise_in_train_mode_only():
    model, handle = patched("deit", "tome_gumbel")
    handle.mode = "soft"
    x = images("deit", batch=1)
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
        handle.method.train()
        assert not torch.equal(model(x), model(x))
        torch.manual_seed(3)
        first = model(x)
        torch.manual_seed(3)
        assert torch.equal(model(x), first)


def test_embeddings_learn_through_the_noise():
    model, handle = patched("mae", "tome_gumbel", temperature=1.0)
    handle.mode = "soft"
    handle.method.train()
    _, grads = gradients(model, images("mae"))
    own = {key: gradient for key, gradient in grads.items() if key.startswith("dtem.")}
    assert own
    for key, gradient in own.items():
        assert torch.isfinite(gradient).all(), key
        assert gradient.abs().max() > 0, key


def test_saved_and_loaded(tmp_path):
    model, handle = patched("deit", "tome_gumbel", candidates=3)
    with torch.no_grad():
        for parameter in handle.method.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    dtem.save_pretrained(handle, tmp_path / "adapter.safetensors")
    other = fresh("deit")
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", other)
    assert loaded.method.name == "tome_gumbel"
    assert loaded.method.config.candidates == 3
    with torch.no_grad():
        assert torch.equal(other(images("deit")), model(images("deit")))
