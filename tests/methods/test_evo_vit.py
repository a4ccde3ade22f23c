"""Evo-ViT against the method written out token by token, and against published GFLOPs."""

import by_hand
import pytest
import timm
import torch

import dtem
from contract.hosts import fresh, gradients, images, patched
from dtem.measure import flops
from dtem.methods.evo_vit import slow_share


def written_out(model, image, plan, summary=True, stage=4, tradeoff=0.5):
    """Scores of one image, its last states, and how many tokens each MLP saw. Placeholders wait for a whole stage in
    their own list, as published; here they are not put back after every block."""
    prefix = model.num_prefix_tokens
    states = list(model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0])
    running, aside, slow, token, added, counts = None, 0, None, None, None, []

    def split():
        """Who is slow, and the token for the others."""
        by_score = sorted(range(prefix, len(states)), key=lambda i: -running[i].item())
        keep = len(by_score) - aside - summary
        fast = by_score[keep:]
        total = sum(running[i] for i in fast)
        return [*range(prefix), *sorted(by_score[:keep])], fast, sum(running[i] / total * states[i] for i in fast)

    def rejoin():
        for i in fast:
            states[i] = states[i] + added

    fast = []
    for layer, (block, r) in enumerate(zip(model.blocks, plan, strict=True)):
        if running is not None and (r or (aside and layer % stage == 0)):
            if aside and summary:
                rejoin()
            aside += r
            slow, fast, token = split()
            added = torch.zeros_like(states[0])
        here = [*(states[i] for i in slow), *([token] if summary else [])] if slow else states
        entered = here[-1]
        here, looks = by_hand.attend(block, here)
        if slow is None:
            running = looks
        else:
            running = running.clone()
            for place, i in enumerate(slow):
                running[i] = (1 - tradeoff) * running[i] + tradeoff * looks[place]
        if slow is None and r:
            states, aside = here, r
            slow, fast, token = split()
            added = torch.zeros_like(states[0])
            here = [*(states[i] for i in slow), *([token] if summary else [])]
            entered = token
        here = [state + block.ls2(block.mlp(block.norm2(state))) for state in here]
        counts.append(len(here))
        if slow is None:
            states = here
            continue
        for place, i in enumerate(slow):
            states[i] = here[place]
        if summary:
            token, added = here[-1], added + (here[-1] - entered)
    if aside and summary:
        rejoin()
    states = [model.norm(state) for state in states]
    if hasattr(model, "head_dist"):
        return (model.head(states[0]) + model.head_dist(states[1])) / 2, states, counts
    pooled = sum(states[prefix:]) / (len(states) - prefix) if model.global_pool == "avg" else states[0]
    return model.head(model.fc_norm(pooled)), states, counts


PLANS = [9, [0, 32, 0, 0], [0, 20, 0, 9], [1, 0, 0, 0], [32, 16, 8, 4]]
SETTINGS = [{"summary": False}, {"stage": 1}, {"stage": 2, "tradeoff": 0.2}]
CASES = [(name, r, {}) for name in ("deit", "distilled", "mae", "dinov2_registers") for r in PLANS]
CASES += [("distilled", r, settings) for settings in SETTINGS for r in PLANS[:3]]


@pytest.mark.parametrize(("name", "r", "settings"), CASES, ids=str)
def test_evo_vit_is_evo_vit_written_out(name, r, settings):
    model, handle = patched(name, "evo_vit", r, **settings)
    model.double()
    computed = []
    for block in model.blocks:
        block.norm2.register_forward_hook(lambda module, args, out: computed.append(out.shape[1]))
    x, host = images(name).double(), fresh(name).double()
    for batch in (x, x[:1]):
        computed.clear()
        with torch.no_grad():
            features = model.forward_features(batch)
            got = model.forward_head(features)
        for image, scores, tokens in zip(batch, got, features, strict=True):
            with torch.no_grad():
                expected, states, counts = written_out(host, image, handle.plan, **settings)
            torch.testing.assert_close(scores, expected, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(tokens, torch.stack(states), rtol=1e-8, atol=1e-9)
        assert computed == counts == list(dtem.schedule.tokens(handle.plan, 64, handle.host.prefix))


def test_a_stage_keeps_its_patches_and_the_next_one_chooses_anew():
    """The switch must matter, or the comparison above shows nothing of it."""
    x = images("deit")
    with torch.no_grad():
        stages = [patched("deit", "evo_vit", [0, 32, 0, 0], stage=stage)[0](x) for stage in (1, 2, 4)]
    assert not torch.allclose(stages[0], stages[2], atol=1e-4)
    assert not torch.allclose(stages[1], stages[2], atol=1e-4)


def test_every_patch_is_back_in_its_place():
    model, handle = patched("deit", "evo_vit", [0, 32, 0, 0], summary=False)
    host, x = fresh("deit"), images("deit")
    assert handle.tokens == (65,) * 4
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_intermediates(x, indices=[0, 1], output_fmt="NLC", intermediates_only=True)
        first = host.forward_intermediates(x, indices=[0], output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(features[0], first, rtol=1e-5, atol=1e-5)
    still = (features[1] - first).abs().amax(dim=2) < 1e-5
    assert still.sum(dim=1).tolist() == [32, 32], "placeholders that nothing updates stay as they are, where they are"
    assert all(torch.equal(source, torch.arange(1, 65).expand(2, -1)) for source in trace.sources)
    assert all(torch.equal(size, torch.ones(2, 65)) for size in trace.sizes)


def test_with_proportional_attention_the_summary_counts_for_its_patches():
    model, handle = patched("deit", "evo_vit", [0, 32, 0, 0], proportional=True)
    seen = []
    bias = handle.method.bias
    handle.method.bias = lambda tokens: seen.append(tokens.size) or bias(tokens)
    with torch.no_grad():
        got = model(images("deit"))
    assert not torch.allclose(got, patched("deit", "evo_vit", [0, 32, 0, 0])[0](images("deit")), atol=1e-4)
    assert seen[0] is None
    assert all(size[0].tolist() == [1.0] * 32 + [33.0] for size in seen[1:] if size is not None)


def test_gradients_are_those_of_evo_vit_written_out():
    """They flow through the running attention that weighs the summary too."""
    model, handle = patched("deit", "evo_vit", [0, 20, 0, 9])
    model.double()
    x, host = images("deit", batch=1).double(), fresh("deit").double()
    _, grads = gradients(model, x)
    out = written_out(host, x[0], handle.plan)[0].unsqueeze(0)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    for key, parameter in host.named_parameters():
        torch.testing.assert_close(
            grads[key], parameter.grad, rtol=1e-7, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("summary", 1), ("stage", 0), ("stage", None), ("stage", 1.5), ("tradeoff", 1.1), ("tradeoff", True)],
)
def test_a_bad_option_is_refused_by_value(name, value):
    with pytest.raises(dtem.DtemError, match=f"{name} = {value!r}"):
        patched("deit", "evo_vit", **{name: value})


def test_slow_share():
    plan = slow_share(0.5, 196)
    assert plan == (0, 0, 0, 0, 98, 0, 0, 0, 0, 0, 0, 0)
    assert dtem.schedule.clamp(plan, 196) == plan, "a schedule takes it as it is"
    for settings, said in [({"share": 0.0}, "0.0"), ({"share": 1.1}, "1.1"), ({"first": 12}, "12")]:
        with pytest.raises(dtem.DtemError, match=said):
            slow_share(**{"share": 0.5, "patches": 196, **settings})


@pytest.mark.parametrize(("model", "printed"), [("deit_small_patch16_224", 3.0), ("deit_base_patch16_224", 11.6)])
def test_published_gflops(model, printed):
    """As DTEM's table of fine-tuned models prints them, within 2 %."""
    with torch.device("meta"):
        handle = dtem.patch(timm.create_model(model), "evo_vit", r=slow_share(0.5, 196))
    count = flops.count(handle.model, handle.host.image)
    assert count.macs / 1e9 == pytest.approx(printed, rel=0.02)
