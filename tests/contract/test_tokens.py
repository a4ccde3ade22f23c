"""What merging does to tokens: nothing is lost, nothing is invented, images do not mix."""

import itertools

import pytest
import torch

from contract.hosts import DEPTH, HOSTS, TIMM, R, ask, every, fresh, gradients, images, patched, records
from dtem import schedule

pytestmark = pytest.mark.contract


def trace_of(handle, x):
    with torch.no_grad(), handle.trace() as trace:
        ask(handle.model, x)
    return trace


def restored(handle):
    """Whether the last record of a trace holds every token again."""
    return handle.method.restores and not handle.method.resets_each_block


@every(whole=True)
def test_sizes_sum_to_the_tokens_at_the_start(name, method):
    _, handle = patched(name, method)
    trace = trace_of(handle, images(name))
    start = handle.host.prefix + handle.host.patches
    for size, count in zip(trace.sizes, records(handle), strict=True):
        assert size.shape == (2, count)
        assert torch.equal(size.sum(dim=1), torch.full((2,), float(start)))
        assert torch.equal(size, size.round())
        assert size.min() >= 1
    assert (trace.sizes[-1].max() > 1) != restored(handle)


@every(soft=True, whole=True)
def test_soft_sizes_sum_to_the_tokens_at_the_start(name, method):
    _, handle = patched(name, method)
    handle.mode = "soft"
    trace = trace_of(handle, images(name))
    start = handle.host.prefix + handle.host.patches
    assert len(trace.sizes) == len(records(handle))
    for size in trace.sizes:
        torch.testing.assert_close(size.sum(dim=1), torch.full((2,), float(start)), rtol=1e-5, atol=0)
        assert size.min() >= 0
        assert torch.equal(size[:, : handle.host.prefix], torch.ones(2, handle.host.prefix))


@every()
def test_sources_map_every_patch_to_a_token_of_the_right_size(name, method):
    _, handle = patched(name, method)
    prefix, patches = handle.host.prefix, handle.host.patches
    trace = trace_of(handle, images(name, batch=3))
    assert len(trace.sources) == len(records(handle))
    for source, size in zip(trace.sources, trace.sizes, strict=True):
        assert source.shape == (3, patches)
        assert source.max() < size.shape[1]
        dropped = source < 0
        assert torch.equal(dropped, source == -1)
        assert source[~dropped].min() >= prefix, "a patch went into a prefix token"
        if not handle.method.conserves_size:
            assert dropped.any()
            continue
        assert not dropped.any()
        counted = torch.stack([row.bincount(minlength=size.shape[1]) for row in source])
        assert torch.equal(counted[:, prefix:].float(), size[:, prefix:])
    for earlier, later in itertools.pairwise(trace.sources):
        assert (later[earlier < 0] < 0).all(), "what was dropped stays dropped"
    same = torch.equal(trace.sources[-1][0], trace.sources[-1][1])
    assert same == restored(handle), "every image merges in its own way, unless all tokens come back"


@every()
def test_prefix_tokens_survive(name, method):
    model, handle = patched(name, method, r="50%")
    prefix = handle.host.prefix
    if HOSTS[name].doors:
        assert prefix == model.num_prefix_tokens
    for size in trace_of(handle, images(name)).sizes:
        assert torch.equal(size[:, :prefix], torch.ones(2, prefix))


@every()
def test_an_image_alone_is_the_image_in_a_batch(name, method):
    model, handle = patched(name, method)
    x = images(name, batch=3)
    with torch.no_grad(), handle.trace() as together:
        expected = ask(model, x)
    with torch.no_grad(), handle.trace() as alone:
        got = ask(model, x[1:2])
    assert torch.equal(alone.sources[-1][0], together.sources[-1][1])
    torch.testing.assert_close(got[0], expected[1], rtol=1e-4, atol=1e-5)


@every(soft=True)
def test_soft_images_do_not_mix(name, method):
    model, handle = patched(name, method)
    handle.mode = "soft"
    x = images(name, batch=3)
    with torch.no_grad():
        torch.testing.assert_close(ask(model, x[1:2])[0], ask(model, x)[1], rtol=1e-4, atol=1e-5)


@every()
def test_the_same_answer_with_and_without_gradients(name, method):
    """Inference takes shortcuts (work in place); they must not show, nor touch the input."""
    model, _ = patched(name, method)
    x = images(name)
    original = x.clone()
    with_gradient = ask(model, x)
    with torch.no_grad():
        without, again = ask(model, x), ask(model, x)
    with torch.inference_mode():
        inference = ask(model, x)
    assert torch.equal(x, original)
    assert torch.equal(without, again)
    torch.testing.assert_close(without, with_gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inference, with_gradient, rtol=1e-4, atol=1e-5)


@every(soft=True)
def test_only_what_the_method_trains_gets_a_gradient(name, method):
    model, handle = patched(name, method)
    if not list(handle.method.parameters()):
        pytest.skip(f"{method} has nothing of its own to train")
    for key, parameter in model.named_parameters():
        if not key.startswith("dtem."):
            parameter.requires_grad_(False)
    handle.mode = "soft"
    _, grads = gradients(model, images(name))
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(key.startswith("dtem.") for key in trained)
    for key, gradient in grads.items():
        if key not in trained:
            assert gradient is None, f"{key} is frozen"
        else:
            assert gradient is not None, key
            assert torch.isfinite(gradient).all(), key
            assert gradient.abs().max() > 0, key


@every(names=[name for name in HOSTS if name != "drop_path"])
def test_hard_merging_trains_the_host(name, method):
    """Fine-tuning with merging on: every weight that has a gradient without merging has one with it."""
    model, _ = patched(name, method)
    x = images(name)
    _, expected = gradients(fresh(name), x)
    _, grads = gradients(model, x)
    for key, gradient in expected.items():
        if gradient is None:
            assert grads[key] is None, key
            continue
        assert torch.isfinite(grads[key]).all(), key
        assert (grads[key].abs().max() > 0) == (gradient.abs().max() > 0), key


@every([name for name in TIMM if name != "dinov2_registers"])  # which refuses it itself
def test_no_images_are_a_batch_too(name, method):
    """Servers drain queues; the host takes a batch of none."""
    model, _ = patched(name, method)
    with torch.no_grad():
        assert ask(model, images(name, batch=0)).shape == ask(fresh(name), images(name, batch=0)).shape


@every(TIMM)
def test_shortcut_is_exact(name, method):
    model, handle = patched(name, method)
    quick, _ = patched(name, method, shortcut=True)
    x = images(name)
    with torch.no_grad():
        torch.testing.assert_close(quick(x), model(x), rtol=1e-4, atol=1e-5)
        assert torch.equal(quick.forward_features(x), model.forward_features(x))
    _, expected = gradients(model, x)
    _, grads = gradients(quick, x)
    for key, gradient in expected.items():
        if gradient is None:
            assert grads[key] is None, key
        else:
            torch.testing.assert_close(grads[key], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
    seen = []
    quick.blocks[-1].norm2.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    with torch.no_grad():
        quick(x)
    computed = schedule.tokens(handle.plan, handle.host.patches, handle.host.prefix)
    assert seen == [handle.host.prefix if handle.host.pooling == "prefix" else computed[-1]]


def test_r_of_the_suite_merges_in_every_block():
    assert R * DEPTH < 63
