"""Blocks that are read once: whatever changes in a block afterwards is seen in the next forward."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import dtem
from dtem.integrations import fast_block

R = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=96).eval()


def images() -> torch.Tensor:
    return torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))


def outputs(host: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return host(images())


def check(host: nn.Module) -> None:
    """The fast path agrees with modules that are called one by one, as they are with gradients."""
    torch.testing.assert_close(host(images()).detach(), outputs(host), rtol=1e-4, atol=1e-4)


def new_weight(block: nn.Module) -> None:
    block.attn.qkv.weight = nn.Parameter(block.attn.qkv.weight.detach() * 2)


def weight_in_place(block: nn.Module) -> None:
    block.mlp.fc1.weight.data.mul_(2)


def new_data(block: nn.Module) -> None:
    block.mlp.fc1.bias.data = block.mlp.fc1.bias.data + 1


def new_layer(block: nn.Module) -> None:
    block.attn.proj = nn.Linear(block.attn.proj.in_features, block.attn.proj.out_features)


def new_mlp(block: nn.Module) -> None:
    block.mlp = nn.Sequential(nn.Linear(64, 64), nn.Tanh())


def layer_scale(block: nn.Module) -> None:
    block.ls1 = timm.models.vision_transformer.LayerScale(64, init_values=0.3)


def norm_weight(block: nn.Module) -> None:
    block.norm1.weight = nn.Parameter(torch.full((64,), 0.5))


def norm_eps(block: nn.Module) -> None:
    block.norm2.eps = 10.0


def scale(block: nn.Module) -> None:
    block.attn.scale *= 3


def other_activation(block: nn.Module) -> None:
    block.mlp.act = nn.ReLU()


def other_class(block: nn.Module) -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    block.mlp.fc2.__class__ = Doubling


def hook(block: nn.Module) -> None:
    block.attn.proj.register_forward_hook(lambda module, args, out: 2 * out)


def pre_hook(block: nn.Module) -> None:
    block.norm1.register_forward_pre_hook(lambda module, args: (args[0].square(),))


def replaced_forward(block: nn.Module) -> None:
    forward = block.mlp.fc1.forward
    block.mlp.fc1.forward = lambda x: 0.5 * forward(x)


def weight_norm(block: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(block.mlp.fc1).parametrizations.weight.original0.data.mul_(2)


def plain_tensor_weight(block: nn.Module) -> None:
    weight = block.attn.qkv.weight.detach()
    del block.attn.qkv.weight
    block.attn.qkv.weight = weight * 2


CHANGES = [
    new_weight, weight_in_place, new_data, new_layer, new_mlp, layer_scale, norm_weight, norm_eps, scale,
    other_activation, other_class, hook, pre_hook, replaced_forward, weight_norm, plain_tensor_weight,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_seen(change) -> None:
    host = model()
    dtem.patch(host, "tome", R)
    before = outputs(host)
    assert torch.equal(outputs(host), before)
    change(host.blocks[1])
    assert not torch.allclose(outputs(host), before, atol=1e-4)
    check(host)


def test_a_plain_tensor_that_is_replaced_is_seen() -> None:
    host = model()
    dtem.patch(host, "tome", R)
    plain_tensor_weight(host.blocks[1])
    before = outputs(host)
    host.blocks[1].attn.qkv.weight = host.blocks[1].attn.qkv.weight * 2
    assert not torch.allclose(outputs(host), before, atol=1e-4)


def test_new_blocks_and_training_are_seen() -> None:
    host = model()
    dtem.patch(host, "tome", R)
    before = outputs(host)
    host.blocks[2] = copy.deepcopy(host.blocks[0])
    assert not torch.allclose(outputs(host), before, atol=1e-4)
    check(host)
    dropping = timm.create_model("test_vit", img_size=96, proj_drop_rate=0.5).eval()
    dtem.patch(dropping, "tome", R)
    assert torch.equal(outputs(dropping), outputs(dropping))
    dropping.train()
    assert not torch.equal(outputs(dropping), outputs(dropping))
    dropping.eval()
    assert torch.equal(outputs(dropping), outputs(dropping))


def test_what_was_read_is_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = model()
    handle = dtem.patch(host, "tome", R)
    outputs(host)
    kept = host.dtem.fast_blocks
    assert all(block is not None for block in kept.fast)
    handle.r = 2
    outputs(host)
    assert host.dtem.fast_blocks is kept
    new_weight(host.blocks[0])
    outputs(host)
    assert host.dtem.fast_blocks is not kept


def test_copies_read_their_own_blocks() -> None:
    host = model()
    dtem.patch(host, "tome", R)
    expected = outputs(host)
    for other in (copy.deepcopy(host), pickle.loads(pickle.dumps(host))):
        assert other.dtem.fast_blocks is None
        assert torch.equal(outputs(other), expected)
        assert other.dtem.fast_blocks.blocks[0] is other.blocks[0]
        weight_in_place(other.blocks[0])
        assert not torch.allclose(outputs(other), expected, atol=1e-4)
        assert torch.equal(outputs(host), expected)


def test_a_block_with_a_wrapped_layer_is_run_module_by_module() -> None:
    host = model()
    assert fast_block.is_plain(host.blocks[0])
    hook(host.blocks[0])
    assert not fast_block.is_plain(host.blocks[0])
