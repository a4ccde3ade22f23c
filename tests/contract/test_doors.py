"""The host's other doors: forward_features, forward_head, forward_intermediates, get_intermediate_layers."""

import inspect

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import dtem
from contract.hosts import DEPTH, FEW, HOSTS, TIMM, every, fresh, images, patched
from dtem import ops

pytestmark = pytest.mark.contract

DOOR = inspect.signature(VisionTransformer.forward_intermediates).parameters
OPTIONS = [
    {},
    {"norm": True, "output_fmt": "NLC"},
    {"return_prefix_tokens": True},
    {"indices": [0, 2], "stop_early": True, "intermediates_only": True},
    {"indices": 2, "norm": True, "return_prefix_tokens": True, "output_fmt": "NLC", "intermediates_only": True},
    {"indices": [1], "stop_early": True},
]
if "output_dict" in DOOR:
    OPTIONS += [
        {"output_dict": True, "return_prefix_tokens": True, "norm": True},
        {"output_dict": True, "intermediates_only": True, "output_fmt": "NLC", "indices": [1], "stop_early": True},
    ]
LAYERS = [{}, {"n": 3, "reshape": True}, {"n": [0, 3], "return_prefix_tokens": True, "norm": True}]


def flatten(value):
    """All tensors of a nested answer, with the path to each."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(f"/{key}{path}", tensor) for key, part in items for path, tensor in flatten(part)]


@every(TIMM)
def test_features_then_head_is_forward(name, method):
    model, handle = patched(name, method)
    x = images(name)
    with torch.no_grad():
        features = model.forward_features(x)
        assert features.shape[1] == handle.tokens[-1]
        assert torch.equal(model.forward_head(features), model(x))
        assert model.forward_head(features, pre_logits=True).shape == (2, 32)


@every(TIMM)
def test_intermediates_without_merging_are_the_hosts(name, method):
    host, x = fresh(name), images(name)
    model, _ = patched(name, method, r=0)
    with torch.no_grad():
        for options in OPTIONS:
            expected, got = host.forward_intermediates(x, **options), model.forward_intermediates(x, **options)
            assert type(got) is type(expected)
            _same(flatten(expected), flatten(got), torch.equal)
        for options in LAYERS:
            expected, got = host.get_intermediate_layers(x, **options), model.get_intermediate_layers(x, **options)
            _same(flatten(expected), flatten(got), torch.equal)


def _same(expected, got, compare):
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, wanted), (_, tensor) in zip(expected, got, strict=True):
        assert compare(tensor, wanted), path


@every([*FEW, "odd_grid"], whole=True)
def test_intermediates_have_the_full_grid(name, method):
    host, x = fresh(name), images(name)
    model, _ = patched(name, method)
    with torch.no_grad():
        for options in OPTIONS:
            expected, got = host.forward_intermediates(x, **options), model.forward_intermediates(x, **options)
            _same(flatten(expected), flatten(got), lambda tensor, wanted: tensor.shape == wanted.shape)
        for options in LAYERS:
            expected, got = host.get_intermediate_layers(x, **options), model.get_intermediate_layers(x, **options)
            _same(flatten(expected), flatten(got), lambda tensor, wanted: tensor.shape == wanted.shape)


@every(TIMM, whole=True)
def test_intermediates_are_the_tokens_unmerged(name, method):
    model, handle = patched(name, method)
    prefix, x = handle.host.prefix, images(name)
    _, height, width = HOSTS[name].image
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        final, layers = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
        grids = model.forward_intermediates(x, intermediates_only=True)
    assert len(layers) == len(grids) == DEPTH
    torch.testing.assert_close(final[:, :prefix], features[:, :prefix], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final[:, prefix:], ops.unmerge(features, trace.sources[-1]), rtol=1e-4, atol=1e-5)
    for layer, grid, source in zip(layers, grids, trace.sources, strict=True):
        patches = layer[0] if prefix else layer
        assert grid.shape == (2, 32, height // 4, width // 4)
        assert torch.equal(grid.flatten(2).transpose(1, 2), patches)
        for image, groups in zip(patches, source, strict=True):
            for group in groups.unique():
                members = image[groups == group]
                assert torch.equal(members, members[:1].expand_as(members))
            assert image.unique(dim=0).shape[0] == groups.unique().shape[0], "different tokens stay different"


@every(FEW, whole=True)
def test_stop_early_stops(name, method):
    model, _ = patched(name, method)
    ran = []
    for layer, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    with torch.no_grad():
        model.forward_intermediates(images(name), indices=[1], stop_early=True)
    assert ran == [0, 1]


@every(whole=False)
def test_intermediates_with_dropped_patches_are_refused(name, method):
    model, handle = patched(name, method)
    x = images(name)
    for door in (model.forward_intermediates, model.get_intermediate_layers):
        with pytest.raises(dtem.DtemError, match=f"{handle.method.name}.*drops"), torch.no_grad():
            door(x)


@every(FEW, whole=True)
def test_intermediates_have_gradients(name, method):
    model, _ = patched(name, method)
    x = images(name).requires_grad_()
    layers = model.forward_intermediates(x, intermediates_only=True)
    layers[-1].square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad.abs().amax(dim=(1, 2, 3)) > 0).all()
