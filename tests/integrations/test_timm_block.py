"""Attention in exported graphs and in the shortcut equals the host's attention."""

import pytest
import timm
import torch
from timm.layers import Attention

import dtem
from dtem.integrations import timm_block


def case(options: dict, biased: bool) -> tuple[Attention, torch.Tensor, torch.Tensor | None]:
    """Attention with random weights, what it reads, and the log sizes."""
    torch.manual_seed(0)
    attn = Attention(24, num_heads=3, **options).double().eval()
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter)
    h = torch.randn(2, 7, 24, dtype=torch.float64)
    bias = torch.randn(2, 7, dtype=torch.float64) if biased else None
    return attn, h, bias


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, {"qkv_bias": True, "proj_bias": False}])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_for_export_is_attention(options: dict, biased: bool) -> None:
    attn, h, bias = case(options, biased)
    projected, taps = timm_block._attention_for_export(attn, h, bias)
    y, expected = timm_block._head_outputs(attn, h, bias)
    torch.testing.assert_close(projected, attn.proj(y))
    for name in ("q", "k", "v"):
        torch.testing.assert_close(getattr(taps, name), getattr(expected, name))


def test_heads_that_are_not_plain_stay_as_they_are() -> None:
    assert timm_block._is_plain(Attention(24, num_heads=3))
    assert not timm_block._is_plain(Attention(24, num_heads=3, qk_norm=True, norm_layer=torch.nn.LayerNorm))


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("prefix", [1, 2])
def test_absorbed_head_outputs_are_head_outputs(options: dict, biased: bool, prefix: int) -> None:
    attn, h, bias = case(options, biased)
    expected = timm_block._prefix_head_outputs(attn, prefix, h, bias)
    torch.testing.assert_close(timm_block._absorbed_head_outputs(attn, prefix, h, bias), expected)
    y, _ = timm_block._head_outputs(attn, h, bias)
    torch.testing.assert_close(expected.transpose(1, 2).reshape(2, prefix, -1), y[:, :prefix])


def test_the_shortcut_drops_attention_out_as_the_host_does() -> None:
    """Keys and values are not absorbed where single probabilities are dropped: then they no longer add up to one."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, attn_drop_rate=0.5).train()
    block, x = model.blocks[-1], torch.randn(2, 5, model.embed_dim)
    torch.manual_seed(1)
    y = timm_block._prefix_head_outputs(block.attn, 1, block.norm1(x), None).transpose(1, 2).reshape(2, 1, -1)
    torch.manual_seed(1)
    torch.testing.assert_close(timm_block.last_attention(block, 1, x, None), x[:, :1] + block.attn.proj(y))


class Wrapped(torch.nn.Linear):
    """As adapters for fine-tuning wrap a layer: what it computes is not in its weight alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize("layer", ["qkv", "proj"])
def test_layers_that_were_wrapped_are_called(layer: str) -> None:
    attn = Attention(24, num_heads=3)
    getattr(attn, layer).__class__ = Wrapped
    assert not timm_block._is_plain(attn)


def test_the_shortcut_calls_a_wrapped_layer() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32).eval()
    model.blocks[-1].attn.qkv.__class__ = Wrapped
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        handle = dtem.patch(model, r=1)
        expected = model(x)
        handle.unpatch()
        dtem.patch(model, r=1, shortcut=True)
        torch.testing.assert_close(model(x), expected)
