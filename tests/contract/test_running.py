"""Ways to run a patched model: checkpointed, copied, in threads, as replicas."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import dtem
from contract.hosts import FEW, HOSTS, LIBRARIES, R, ask, every, gradients, images, patched, records

pytestmark = pytest.mark.contract


def _checkpointing_keeps_gradients(model, x):
    model.train()
    calls = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(lambda *_: calls.append(1))
    expected, expected_grads = gradients(model, x)
    plain = len(calls)
    model.set_grad_checkpointing(True)
    got, grads = gradients(model, x)
    assert len(calls) - plain > plain, "nothing was recomputed: checkpointing did not happen"
    assert torch.equal(got, expected)
    for key, gradient in expected_grads.items():
        if gradient is None:
            assert grads[key] is None, key
        else:
            torch.testing.assert_close(grads[key], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@every()
def test_checkpointing_keeps_gradients(name, method):
    model, _ = patched(name, method)
    _checkpointing_keeps_gradients(model, images(name))


@every(soft=True)
def test_checkpointing_keeps_soft_gradients(name, method):
    model, handle = patched(name, method)
    handle.mode = "soft"
    _checkpointing_keeps_gradients(model, images(name))


@pytest.mark.parametrize("mode", ["hard", "soft"])
@every(["deit", "distilled", "mae", "siglip", "drop_path"])
def test_an_empty_batch_gives_no_rows(name, method, mode):
    """As without merging. transformers' models, EVA and timm's dynamic image sizes take no empty batch themselves."""
    model, handle = patched(name, method)
    if mode == "soft" and not handle.method.has_soft_mode():
        pytest.skip("no soft mode")
    handle.mode = mode
    with torch.no_grad():
        assert ask(model, images(name)[:0]).shape == (0, *ask(model, images(name)).shape[1:])


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every()
def test_deep_copies_are_equal_and_independent(name, method):
    _copies_are_equal_and_independent(name, method, copy.deepcopy)


@pytest.mark.parametrize("copied", [through_pickle, through_torch_save])
@every([*FEW, *LIBRARIES])
def test_saved_copies_are_equal_and_independent(name, method, copied):
    _copies_are_equal_and_independent(name, method, copied)


def _copies_are_equal_and_independent(name, method, copied):
    model, handle = patched(name, method)
    x = images(name)
    other = copied(model)
    steer = dtem.Handle(other)
    assert type(other) is type(model)
    assert steer.r == R
    assert steer.host == handle.host
    with torch.no_grad():
        expected = ask(model, x)
        assert torch.equal(ask(other, x), expected)
        steer.r = 2
        assert handle.r == R
        assert torch.equal(ask(model, x), expected)
        assert not torch.equal(ask(other, x), expected)
        steer.unpatch()
        assert torch.equal(ask(model, x), expected)
    if HOSTS[name].soft and handle.method.has_soft_mode():
        handle.mode = "soft"
        assert dtem.Handle(copied(model)).mode == "soft"


def in_threads(work, count=8):
    """Run work(0) … work(count − 1) at the same time; results in order, errors raised."""
    results, errors, start = [None] * count, [], threading.Barrier(count)

    def run(index):
        try:
            start.wait(timeout=60)
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@every([*FEW, *LIBRARIES])
def test_threads_share_one_model(name, method):
    model, handle = patched(name, method)
    inputs = [images(name, batch=1 + index % 3, seed=index) for index in range(8)]

    def run(index):
        outputs = []
        for _ in range(3):
            with torch.no_grad(), handle.trace() as trace:
                out = ask(model, inputs[index])
            outputs.append((out, trace.sources, trace.sizes))
        return outputs

    serial = [run(index) for index in range(8)]
    with pytest.warns(UserWarning, match="recorded nothing"), handle.trace() as outer:
        at_once = in_threads(run)
    assert outer.sizes == [], "forwards are recorded by the trace of their own thread"
    for expected, got in zip(serial, at_once, strict=True):
        for (out, sources, sizes), (out2, sources2, sizes2) in zip(expected, got, strict=True):
            torch.testing.assert_close(out2, out, rtol=1e-5, atol=1e-6)
            assert len(sources2) == len(sizes2) == len(records(handle))
            assert all(map(torch.equal, sources, sources2))
            assert all(map(torch.equal, sizes, sizes2))


@every([*FEW, *LIBRARIES], soft=True)
def test_threads_train_one_model(name, method):
    model, handle = patched(name, method)
    handle.mode = "soft"
    inputs = [images(name, batch=1, seed=index) for index in range(4)]
    learns = handle.method if list(handle.method.parameters()) else model
    weights = [parameter for parameter in learns.parameters() if parameter.requires_grad]

    def run(index):
        return torch.autograd.grad(ask(model, inputs[index]).square().sum(), weights)

    for expected, got in zip(map(run, range(4)), in_threads(run, 4), strict=True):
        for wanted, gradient in zip(expected, got, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def replica(model):
    """What torch.nn.parallel.replicate makes of a module, which itself runs on CUDA only: shallow copies of every
    module, with weights as plain tensors instead of parameters."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in copies.items():
        for key, child in module._modules.items():
            if child is not None:
                setattr(twin, key, copies[child])
        for key, parameter in module._parameters.items():
            setattr(twin, key, None if parameter is None else parameter.clone())
    return copies[model]


@every([*FEW, *LIBRARIES])
def test_replicas_as_data_parallel_makes_them(name, method):
    model, _ = patched(name, method)
    twins = [replica(model), replica(model)]
    assert not list(twins[0].parameters())
    x = images(name, batch=4)

    def run(index):
        with torch.no_grad():
            return ask(twins[index], x[2 * index : 2 * index + 2])

    with torch.no_grad():
        torch.testing.assert_close(torch.cat(in_threads(run, 2)), ask(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="DataParallel itself needs two CUDA devices")
@every(["distilled", "siglip"])
def test_data_parallel(name, method):
    model, _ = patched(name, method)
    x = images(name, batch=4).cuda()
    model.cuda()
    with torch.no_grad():
        torch.testing.assert_close(nn.DataParallel(model)(x), model(x), rtol=1e-3, atol=1e-4)
