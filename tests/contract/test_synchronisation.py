"""A merged forward never waits for the device, and its shapes follow from r alone: what a GPU and CUDA graphs need.

Forwards run on fake CUDA tensors, which have shapes but no values, so that no GPU is needed.
"""

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dtem
from dtem import integrations, methods, ops

WAITING = (
    *("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal", "unique_dim"),
    *("_unique", "_unique2", "unique_consecutive", "repeat_interleave.Tensor"),
)
OF_TIMM = integrations.load("timm_vit").provides | {"class_token"}
STATIC = [
    name for name in methods.METHODS if not methods.find(name).variable_length and methods.find(name).needs <= OF_TIMM
]


class NoWaiting(TorchDispatchMode):
    """Refuses operations that wait for values, and copies between devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert not {name, name.partition(".")[0]} & {*WAITING}, f"{name} waits for the device"
        out = func(*args, **(kwargs or {}))
        devices = {each.device for each in (*args, out) if isinstance(each, Tensor) and each.ndim}
        assert len(devices) <= 1, f"{name} copies between {devices}"
        return out


def timm_vit() -> nn.Module:
    return timm.create_model("test_vit", img_size=96).eval()


def averaging() -> nn.Module:
    return timm.create_model("test_vit", img_size=96, global_pool="avg", class_token=False, num_classes=5).eval()


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 96}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, image_size=96)).eval()


def patched(build: Callable[[], nn.Module], method: str) -> dtem.Handle:
    handle = dtem.patch(build(), method)
    stages = handle.method.stages
    handle.r = [4 if stages is None or layer in stages else 0 for layer in range(handle.host.depth)]
    return handle


def run_on_fake_cuda(model: nn.Module) -> Tensor:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    forward = integrations.as_logits_fn(model)
    prefix = "" if forward is model else "model."
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        weights = {
            prefix + name: torch.empty(part.shape, dtype=part.dtype, device="cuda") for name, part in state.items()
        }
        images = torch.empty(2, 3, 96, 96, device="cuda")
        with NoWaiting():
            return torch.func.functional_call(forward, weights, (images,))


CASES = [(timm_vit, name) for name in STATIC]
CASES += [(build, name) for build in (averaging, transformers_vit) for name in ("tome", "dtem")]


@pytest.mark.parametrize(("build", "method"), CASES)
def test_a_forward_does_not_wait_for_the_device(build: Callable[[], nn.Module], method: str) -> None:
    assert run_on_fake_cuda(patched(build, method).model).device.type == "cuda"


@pytest.mark.parametrize("wait", ["item", "nonzero", "mask", "copy"])
def test_a_method_that_waits_is_found(wait: str) -> None:
    def reduce(layer, tokens, taps, r):
        {
            "item": lambda: tokens.x[0, 0, 0].item(),
            "nonzero": lambda: tokens.x.nonzero(),
            "mask": lambda: tokens.x[tokens.x > 0],
            "copy": lambda: tokens.x.cpu(),
        }[wait]()
        return tokens

    handle = patched(timm_vit, "tome")
    handle.method.reduce = reduce
    handle.method.merges_only = False
    with pytest.raises(Exception, match=r"waits for the device|copies between|nonzero"):
        run_on_fake_cuda(handle.model)


def test_what_fake_tensors_leave_is_not_used_later() -> None:
    handle = patched(timm_vit, "tome")
    with FakeTensorMode(), torch.no_grad():
        ops.match(torch.empty(2, 43, 5), 4, 1)
    assert ops.match(torch.randn(2, 43, 5).double(), 4, 1).kept.shape == (2, 39)
    run_on_fake_cuda(handle.model)
    with torch.no_grad():
        assert handle.model(torch.randn(2, 3, 96, 96)).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("method", ["tome", "dtem"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_forward_runs_as_a_cuda_graph(method: str, dtype: torch.dtype) -> None:
    handle = patched(timm_vit, method)
    model = handle.model.to("cuda", dtype).requires_grad_(False)
    images = [torch.randn(2, 3, 96, 96, device="cuda", dtype=dtype) for _ in range(3)]
    with torch.no_grad():
        expected = [model(each).clone() for each in images]
        graphed = torch.cuda.make_graphed_callables(model, (images[0].clone(),))
        for each, wanted in zip(images, expected, strict=True):
            torch.testing.assert_close(graphed(each), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_log_sizes_keep_flash_attention_on_a_gpu() -> None:
    q, k, v = torch.randn(3, 2, 4, 50, 64, device="cuda", dtype=torch.bfloat16)
    bias = torch.randint(1, 5, (2, 50), device="cuda").float().log()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        by_flash = ops.attend(q, k, v, bias, 0.125)
    masked = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=bias[:, None, None], scale=0.125
    )
    torch.testing.assert_close(by_flash.float(), masked, rtol=2e-2, atol=2e-2)


def test_on_a_gpu_the_bias_is_a_channel_in_half_precision() -> None:
    with FakeTensorMode():
        for dtype, channel in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
            q, bias = torch.empty(1, 2, 9, 64, device="cuda", dtype=dtype), torch.empty(1, 9, device="cuda")
            assert ops.attention.takes_channel(q, bias) == channel
            assert ops.attend(q, q, q, bias, 0.125).shape == q.shape
        assert not ops.attention.takes_channel(torch.empty(1, 2, 9, 64, dtype=torch.bfloat16), torch.empty(1, 9))
