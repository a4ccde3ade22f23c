"""DiffRate against the method written out token by token, and against published GFLOPs."""

import functools
import math

import by_hand
import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, images, patched
from dtem.measure import flops
from dtem.methods import diffrate

HOSTS = ["deit", "distilled", "mae", "dinov2_registers"]
WEIGH = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)


def attended(block, states, sizes):
    """States after the attention half, and the class token's attention, averaged over heads."""
    attn, count = block.attn, len(states)
    qkv = torch.stack([attn.qkv(block.norm1(state)) for state in states]).view(count, 3, attn.num_heads, attn.head_dim)
    heads, looks = [], 0.0
    for head in range(attn.num_heads):
        q, k, v = qkv[:, 0, head], qkv[:, 1, head], qkv[:, 2, head]
        matrix = (q @ k.T / math.sqrt(attn.head_dim)).exp() * torch.stack(list(sizes))
        matrix = matrix / matrix.sum(dim=1, keepdim=True)
        heads.append(matrix @ v)
        looks = looks + matrix[0] / attn.num_heads
    update = attn.proj(attn.norm(torch.cat(heads, dim=1)))
    return [state + block.ls1(change) for state, change in zip(states, update, strict=True)], looks


def nearest(state, others):
    """The largest cosine with `others`, and which one that is."""
    cosines = [torch.dot(state, other) / state.norm() / other.norm() for other in others]
    best = max(range(len(cosines)), key=lambda at: cosines[at].item())
    return cosines[best].detach(), best


def read_out(model, states, sizes):
    prefix = model.num_prefix_tokens
    states = [model.norm(state) for state in states]
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2
    pooled = states[0]
    if model.global_pool == "avg":
        pooled = sum(k * s for k, s in zip(sizes[prefix:], states[prefix:], strict=True)) / sum(sizes[prefix:])
    return model.head(model.fc_norm(pooled))


def written_out(model, image, rates, weigh=True):
    """Inference: scores of one image, and the patches that each token holds. `rates`: pruned and merged, by block."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    sizes, holds = [torch.ones((), dtype=image.dtype)] * len(states), [[at] for at in range(len(states))]
    for block, (away, joined) in zip(model.blocks, rates, strict=True):
        states, looks = attended(block, states, sizes if weigh else [torch.ones_like(sizes[0])] * len(sizes))
        ranked = sorted(range(prefix, len(states)), key=lambda at, looks=looks: -looks[at].item())
        ranked = ranked[: len(ranked) - away]
        leaving = ranked[len(ranked) - joined :]
        stay = [*range(prefix), *sorted(ranked[: len(ranked) - joined])]
        groups, more = {at: [states[at]] for at in stay}, {at: [sizes[at]] for at in stay}
        members = {at: list(holds[at]) for at in stay}
        for at in leaving:
            cosine, best = nearest(states[at], [states[other] for other in stay[prefix:]])
            best = stay[prefix + best]
            groups[best].append(states[at])
            more[best].append(sizes[at] * max(cosine, torch.zeros_like(cosine)))
            members[best] += holds[at]
        states = [sum(groups[at]) / len(groups[at]) for at in stay]
        sizes, holds = [sum(more[at]) for at in stay], [members[at] for at in stay]
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
    return read_out(model, states, sizes), sizes, holds


def masked(model, image, method):
    """Training, as published: tokens are sorted in every block, and masked from a rank on. Scores of one image."""
    prefix, patches = model.num_prefix_tokens, method.host.patches
    candidates = list(range(patches, 0, -method.config.step))
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    ones = [torch.ones((), dtype=image.dtype)] * len(states)
    sizes, masks, left = list(ones), list(ones), patches
    for layer, (block, (away, joined)) in enumerate(zip(model.blocks, method.rates(), strict=True)):
        states, looks = attended(block, states, [m * s for m, s in zip(masks, sizes, strict=True)])
        ranked = sorted(range(prefix, len(states)), key=lambda at, looks=looks: (-looks[at].item(), at))
        order = [*range(prefix), *ranked]
        states, sizes, masks = ([part[at] for at in order] for part in (states, sizes, masks))
        middle, after = left - away, left - away - joined
        for logits, first, last in ((method.prune, middle, left), (method.merge, after, middle)):
            chances = logits.view(len(model.blocks), -1)[layer].softmax(dim=0)
            for rank in range(patches):
                held = sum(c for c, count in zip(chances, candidates, strict=True) if count > rank)
                hard = 0.0 if first <= rank < last else 1.0
                masks[prefix + rank] = masks[prefix + rank] * (hard + held - held.detach())
        targets = range(prefix, prefix + after)
        groups, more = {at: [states[at]] for at in targets}, {at: [sizes[at]] for at in targets}
        for at in range(prefix + after, prefix + middle):
            cosine, best = nearest(states[at], [states[other] for other in targets])
            groups[prefix + best].append(states[at])
            more[prefix + best].append(sizes[at] * max(cosine, torch.zeros_like(cosine)))
        for at in targets:
            states[at], sizes[at] = sum(groups[at]) / len(groups[at]), sum(more[at])
        states = [state + block.ls2(block.mlp(block.norm2(state))) for state in states]
        left = after
    return read_out(model, states, [m * s for m, s in zip(masks, sizes, strict=True)])


def learn(handle, pruned, merged):
    """Rates with these means: patches kept by pruning and by merging, for every block."""
    counts = torch.arange(handle.host.patches, 0, -handle.method.config.step, dtype=torch.float64)
    with torch.no_grad():
        for parameter, means in ((handle.method.prune, pruned), (handle.method.merge, merged)):
            parameter.copy_(diffrate.tilted(counts, torch.tensor(means, dtype=torch.float64)).flatten())


KEPT = ([60.0, 52.0, 40.0, 33.0], [52.0, 50.0, 35.0, 18.0])
RATES = ((4, 8), (0, 2), (10, 5), (2, 15))


def test_learned_counts_are_the_plan():
    _, handle = patched("deit", "diffrate")
    learn(handle, *KEPT)
    assert handle.method.rates() == RATES
    handle.r = "learned"
    assert handle.r == "learned"
    assert handle.plan == (12, 2, 15, 17)
    learn(handle, [64.0] * 4, [64.0, 40.0, 64.0, 4.1])
    assert handle.plan == (12, 2, 15, 17), "as it was when it was asked for"
    handle.r = "learned"
    assert handle.plan == (0, 24, 0, 20), "counts never rise, and no block removes more than half"
    assert handle.method.rates() == ((0, 0), (0, 24), (0, 0), (0, 20))


@pytest.mark.parametrize("name", HOSTS)
def test_inference_is_diffrate_written_out(name):
    model, handle = patched(name, "diffrate")
    learn(handle, *KEPT)
    handle.r = "learned"
    _check(name, model, handle, RATES)


def test_any_schedule_is_split_as_learned():
    model, handle = patched("deit", "diffrate", [6, 4, 0, 9])
    learn(handle, *KEPT)
    _check("deit", model, handle, ((2, 4), (0, 4), (0, 0), (1, 8)))


def test_without_proportional_attention():
    model, handle = patched("deit", "diffrate", proportional=False)
    learn(handle, *KEPT)
    handle.r = "learned"
    _check("deit", model, handle, RATES, weigh=False)


def _check(name, model, handle, rates, weigh=True):
    model.double()
    x, prefix, host = images(name).double(), handle.host.prefix, fresh(name).double()
    for batch in (x, x[:1]):
        with torch.no_grad(), handle.trace() as trace:
            got = model(batch)
        for image, scores, source, size in zip(batch, got, trace.sources[-1], trace.sizes[-1], strict=True):
            with torch.no_grad():
                expected, sizes, holds = written_out(host, image, rates, weigh)
            torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
            wanted = torch.full((prefix + 64,), -1)
            for token, held in enumerate(holds):
                wanted[held] = token
            assert torch.equal(source, wanted[prefix:])
            torch.testing.assert_close(size.double(), torch.stack(sizes), rtol=1e-5, atol=1e-5)


def test_before_training_it_prunes_and_merges_halves():
    _, handle = patched("deit", "diffrate")
    for pruned, merged in handle.method.rates():
        assert abs(pruned - merged) <= 1
        assert pruned + merged in (12, 13)
    with torch.device("meta"):
        small = dtem.patch(timm.create_model("deit_small_patch16_224"), "diffrate", 16)
    assert small.plan == (*[16] * 11, 10)
    with pytest.raises(dtem.DtemError, match="without weights"):
        small.r = "learned"


def test_tilted_distributions_have_their_means():
    counts = torch.arange(196, 0, -4, dtype=torch.float64)
    means = torch.tensor([190.0, 100.0, 50.0, 12.0], dtype=torch.float64)
    logits = diffrate.tilted(counts, means)
    torch.testing.assert_close(logits.softmax(dim=1) @ counts, means, rtol=1e-6, atol=1e-6)
    assert diffrate.tilted(counts, counts.mean()[None]).abs().max() < 1e-6, "the middle is uniform"


@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("name", HOSTS)
def test_training_computes_what_inference_does(name, proportional):
    """Whatever the schedule: in soft mode it is only the budget."""
    model, handle = patched(name, "diffrate", 3, proportional=proportional)
    learn(handle, *KEPT)
    model.double()
    handle.mode = "soft"
    x = images(name).double()
    with torch.no_grad():
        soft = model(x)
        handle.mode, handle.r = "hard", "learned"
        torch.testing.assert_close(soft, model(x), rtol=1e-3, atol=1e-3)
        handle.r = 3
        assert not torch.allclose(soft, model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_gradients_are_those_of_masks_written_out(name):
    model, handle = patched(name, "diffrate")
    learn(handle, *KEPT)
    model.double()
    handle.mode = "soft"
    x, learned = images(name, batch=1).double(), [handle.method.prune, handle.method.merge]
    got = torch.autograd.grad((model(x)[0] * WEIGH).sum(), learned)
    expected = torch.autograd.grad((masked(fresh(name).double(), x[0], handle.method) * WEIGH).sum(), learned)
    for gradient, wanted in zip(got, expected, strict=True):
        assert wanted.view(4, -1)[:3].abs().amax(dim=1).min() > 1e-4
        torch.testing.assert_close(gradient, wanted, rtol=1e-2, atol=1e-4 * wanted.abs().max().item())


def test_the_budget_loss_is_the_difference_that_is_counted():
    """Up to what the method itself computes: similarities, and the class token's attention again."""
    model, handle = patched("deit", "diffrate", 9)
    learn(handle, *KEPT)
    handle.mode = "soft"
    with handle.auxiliary_losses() as losses:
        model(images("deit"))
    handle.mode = "hard"
    spent = []
    for r in ("learned", 9):
        handle.r = r
        spent.append(flops.count(model, handle.host.image).macs / 1e9)
    over = (losses["flops"].item() / 5.0) ** 0.5
    assert over == pytest.approx(abs(spent[0] - spent[1]), rel=0.1)


@pytest.mark.parametrize("r", [4, 20])
def test_the_budget_loss_alone_learns_to_meet_the_budget(r):
    model, handle = patched("deit", "diffrate", r, flops_weight=1e6)
    handle.mode = "soft"
    optimiser = torch.optim.Adam(handle.method.parameters(), lr=0.1)
    x, found = images("deit", batch=1), []
    for _ in range(60):
        with handle.auxiliary_losses() as losses:
            model(x)
        optimiser.zero_grad()
        losses["flops"].backward()
        optimiser.step()
        found.append(losses["flops"].item())
    assert found[-1] < 0.05 * found[0]
    handle.mode = "hard"
    spent = {}
    for rate in (r, "learned"):
        handle.r = rate
        spent[rate] = flops.count(model, handle.host.image).macs
    assert spent["learned"] == pytest.approx(spent[r], rel=0.03)


@pytest.mark.parametrize("shortcut", [False, True])
def test_losses_under_checkpointing(shortcut):
    by_hand.check_losses_under_checkpointing("diffrate", "flops", 1000000.0, shortcut, atol=1e-09)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_half_precision(mode):
    by_hand.check_half_precision("diffrate", mode)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_other_image_sizes(mode):
    model, handle = patched("dinov2_registers", "diffrate", 4)
    handle.mode = mode
    with torch.no_grad(), handle.auxiliary_losses() as losses:
        assert torch.isfinite(model(torch.randn(2, 3, 48, 40))).all()
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_learned_rates_are_saved(tmp_path):
    model, handle = patched("deit", "diffrate")
    learn(handle, *KEPT)
    handle.r = "learned"
    dtem.save_pretrained(handle, tmp_path / "one.safetensors", trained_r=9)
    x = images("deit")
    for r in (None, "learned"):
        other = dtem.from_pretrained(tmp_path / "one.safetensors", fresh("deit"), r)
        assert other.plan == (12, 2, 15, 17)
        with torch.no_grad():
            assert torch.equal(other.model(x), model(x))


def test_only_a_method_that_learns_a_schedule_has_one():
    model = fresh("deit")
    with pytest.raises(dtem.DtemError, match=r"'learned'.*'tome' learns no schedule"):
        dtem.patch(model, "tome", "learned")
    assert not hasattr(model, "dtem")


@pytest.mark.parametrize(
    "options", [{"step": 0}, {"step": 2.5}, {"flops_weight": -1.0}, {"proportional": "yes"}], ids=str
)
def test_a_bad_option_is_refused_by_value(options):
    name, value = next(iter(options.items()))
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        patched("deit", "diffrate", **options)


PUBLISHED = {
    "S": ("deit_small_patch16_224", "token", 2.905, (194, 176, 156, 141, 133, 121, 107, 88, 64, 56, 3)),
    "B": ("deit_base_patch16_224", "token", 11.517, (197, 192, 178, 158, 145, 127, 111, 94, 50, 35, 3)),
    "MAE-B": ("vit_base_patch16_224", "avg", 11.517, (192, 178, 164, 150, 133, 115, 101, 96, 82, 49, 49)),
}
"""GFLOPs that the authors print, and the tokens that their learned rates leave after each block but the first."""


@functools.cache
def empty(name, pool):
    with torch.device("meta"):
        return dtem.patch(timm.create_model(name, global_pool=pool), "diffrate")


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_gflops(model):
    """Within 2 %; where the last block drops nearly all tokens there, it drops half here."""
    name, pool, gflops, tokens = PUBLISHED[model]
    handle = empty(name, pool)
    handle.r = [0, *(before - after for before, after in zip((197, *tokens), tokens, strict=False))]
    macs = flops.count(handle.model, handle.host.image).macs / 1e9
    assert macs == pytest.approx(gflops, rel=0.02)
