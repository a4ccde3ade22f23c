"""Patched models inside other tools: in either order, the merged model computes what it computes alone."""

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import dtem
from dtem import integrations
from dtem.errors import DtemError
from dtem.integrations import cpu_workspace
from dtem.models.segmenter import MaskDecoder, Segmenter

pytestmark = pytest.mark.contract

R = 8


def perturbed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def timm_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    tiny = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 7}
    return perturbed(timm.create_model("vit_tiny_patch16_224", **{**tiny, **options}))


def hf_vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128
    )
    return perturbed(transformers.ViTForImageClassification(config))


def hf_clip() -> nn.Module:
    torch.manual_seed(0)
    tiny = {"image_size": 64, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**tiny, intermediate_size=128, projection_dim=7)
    return perturbed(transformers.CLIPVisionModelWithProjection(config))


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    encoder = timm_vit(num_classes=0)
    return perturbed(Segmenter(encoder, MaskDecoder(64, 5, depth=1, heads=2)))


HOSTS = {"timm": timm_vit, "transformers": hf_vit, "CLIP": hf_clip}
METHODS = ("tome", "dtem")


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    if not isinstance(out, Tensor):
        out = out.logits if "logits" in out else out.image_embeds
    return out.float()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """All blocks of an encoder."""
    paths = ("blocks", "encoder.blocks", "vit.layers", "vision_model.encoder.layers")
    lists = [dict(model.named_modules()).get(path) for path in paths]
    return list(next(blocks for blocks in lists if blocks is not None)._modules.values())


def torchao(name: str) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        quantization.quantize_(model, getattr(quantization, name)())
        return model

    return apply


ADAPTED = ("qkv", "q_proj", "v_proj", "out_proj", "o_proj", "fc1", "fc2")


def lora(dora: bool) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        names = [part for part in ADAPTED if any(name.endswith(part) for name, _ in model.named_modules())]
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False, use_dora=dora)
        return peft.get_peft_model(model, config).eval()

    return apply


def dynamic_int8(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def dispatched(model: nn.Module) -> nn.Module:
    import accelerate

    return accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


def offloaded(model: nn.Module) -> nn.Module:
    import accelerate

    state = model.state_dict()
    if hasattr(model, "dtem"):
        state = {**state, **dtem.Handle(model).state_dict()}
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=state)
    return model


def scaled_by_hand(model: nn.Module) -> nn.Module:
    """Linear layers whose forward was replaced, as accelerate and users do it."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and not name.startswith("dtem."):
            layer.forward = lambda x, forward=layer.forward: 1.1 * forward(x)
    return model


TOOLS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.half(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "torchao int8 weight-only": torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torch.ao dynamic int8": dynamic_int8,
    "LoRA": lora(dora=False),
    "DoRA": lora(dora=True),
    "dispatch_model": dispatched,
    "cpu_offload": offloaded,
    "replaced forward": scaled_by_hand,
    "DataParallel": nn.DataParallel,
}
REFUSED = {("cpu_offload", "dtem")}
"""Tools that must come after patching."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("order", ["patch first", "patch after"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", HOSTS)
def test_in_either_order(host: str, method: str, tool: str, order: str) -> None:
    model, apply = HOSTS[host](), TOOLS[tool]
    if order == "patch first":
        handle = dtem.patch(model, method, r=R)
        wrapped = apply(model)
    else:
        wrapped = apply(model)
        if (tool, method) in REFUSED:
            with pytest.raises(DtemError, match=r"call dtem\.patch before cpu_offload"):
                dtem.patch(wrapped, method, r=R)
            return
        handle = dtem.patch(wrapped, method, r=R)
    x = images().to({"bfloat16": torch.bfloat16, "float16": torch.float16}.get(tool, torch.float32))
    plain = apply(HOSTS[host]())
    with torch.no_grad():
        merged, unmerged = logits(wrapped, x), logits(plain, x)
        handle.r = 0
        assert torch.equal(logits(wrapped, x), unmerged)
        handle.r = R
    assert not torch.allclose(merged, unmerged, atol=1e-3)
    # With gradients every layer is called as a module: the fast path on CPU must agree with that.
    torch.testing.assert_close(logits(wrapped, x).detach(), merged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", HOSTS)
def test_autocast(host: str, method: str, dtype: torch.dtype) -> None:
    model, plain = HOSTS[host](), HOSTS[host]()
    handle = dtem.patch(model, method, r=R)
    with torch.autocast("cpu", dtype=dtype):
        with torch.no_grad():
            merged, unmerged = logits(model, images()), logits(plain, images())
            with handle.at(r=0):
                assert torch.equal(logits(model, images()), unmerged)
        assert not torch.allclose(merged, unmerged, atol=1e-2)
        torch.testing.assert_close(logits(model, images()).detach(), merged, rtol=1e-4, atol=1e-4)
        if method == "dtem":
            handle.mode = "soft"
            logits(model, images()).square().mean().backward()
            assert any(parameter.grad is not None for parameter in handle.parameters())
            assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in handle.parameters())


LAYERS = {
    "timm": [
        "attn.qkv",
        "attn.proj",
        "attn.proj_drop",
        "ls1",
        "norm2",
        "mlp",
        "mlp.act",
        "mlp.fc1",
        "mlp.fc2",
        "drop_path2",
    ],
    "Segmenter": ["attn.proj", "mlp", "mlp.act", "mlp.fc1", "mlp.drop1"],
    "transformers": ["attention.o_proj", "mlp", "mlp.activation_fn"],
    "CLIP": ["self_attn.out_proj", "mlp", "mlp.activation_fn", "mlp.fc1", "mlp.fc2"],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("host", "layer"), [(host, layer) for host, layers in LAYERS.items() for layer in layers])
def test_a_layer_with_another_forward_is_called(host: str, layer: str, method: str) -> None:
    """Its weights used directly would change the class."""
    model = {**HOSTS, "Segmenter": segmenter}[host]()
    dtem.patch(model, method, r=R)
    module = blocks_of(model)[0].get_submodule(layer)
    with torch.no_grad():
        before = logits(model, images())
        module.forward = lambda *args, forward=module.forward: 0.5 * forward(*args)
        after = logits(model, images())
    assert not torch.allclose(after, before, atol=1e-3)
    torch.testing.assert_close(logits(model, images()).detach(), after, rtol=1e-4, atol=1e-4)


def test_global_hooks_see_every_layer() -> None:
    model, seen = timm_vit(), set()
    dtem.patch(model, "tome", r=R)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        with torch.no_grad():
            model(images())
    finally:
        hook.remove()
    linears = {module for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)}
    assert linears <= seen


def test_the_fast_path_is_taken_for_plain_layers_alone() -> None:
    layer = nn.Linear(4, 4)
    assert cpu_workspace.is_plain_linear(layer)
    assert not cpu_workspace.is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    assert not cpu_workspace.is_plain_linear(hooked)


@pytest.mark.parametrize(("host", "method"), [("timm", "tome"), ("transformers", "dtem")])
def test_a_compiled_model_is_patched_inside_and_follows_r(host: str, method: str) -> None:
    """Patched first and compiled then: `test_compile.py`."""
    model, alone = HOSTS[host](), HOSTS[host]()
    compiled = torch.compile(model, backend="eager")
    handle, other = dtem.patch(compiled, method, r=R), dtem.patch(alone, method, r=R)
    assert handle.model is model
    with torch.no_grad():
        for r in (R, 0):
            handle.r = other.r = r
            torch.testing.assert_close(logits(compiled, images()), logits(alone, images()), rtol=1e-4, atol=1e-4)


def test_a_container_says_what_to_patch() -> None:
    with pytest.raises(DtemError, match=r"patch model.get_submodule\('1'\), a VisionTransformer"):
        dtem.patch(nn.Sequential(nn.Identity(), timm_vit()), r=R)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("host", HOSTS)
def test_distributed_data_parallel(host: str) -> None:
    model = HOSTS[host]()
    handle = dtem.patch(model, r=R)
    handle.mode = "soft"
    model.requires_grad_(False)
    model.dtem.requires_grad_(True)
    handle.method.embeddings[-1].requires_grad_(False)  # what the last block merges never reaches the class token
    parallel = nn.parallel.DistributedDataParallel(model)
    logits(parallel, images()).sum().backward()
    assert all(parameter.grad is not None for parameter in handle.parameters())
    assert dtem.Handle(parallel).model is model


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", HOSTS)
def test_distributed_data_parallel_computes_the_same(host: str, method: str) -> None:
    parallel, alone = nn.parallel.DistributedDataParallel(HOSTS[host]()), HOSTS[host]()
    handle = dtem.patch(parallel, method, r=R)
    dtem.patch(alone, method, r=R)
    with torch.no_grad():
        assert torch.equal(logits(parallel, images()), logits(alone, images()))
    assert handle.model is parallel.module


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_fully_shard(method: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model, alone = timm_vit(), timm_vit()
    handle, _ = dtem.patch(model, method, r=R), dtem.patch(alone, method, r=R)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        torch.testing.assert_close(model(images()), alone(images()), rtol=1e-4, atol=1e-4)
    with pytest.raises(DtemError, match="changed after patching"):
        handle.unpatch()
    with pytest.raises(DtemError, match=r"call dtem\.patch before fully_shard"):
        dtem.patch(fully_shard(timm_vit(), mesh=mesh), method, r=R)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["embeddings", "norms too"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_sharded_model_is_trained_saved_and_loaded(host: str, options: dict, tmp_path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    handles = []
    for sharded in (False, True):
        model = HOSTS[host]().requires_grad_(False)
        handle = dtem.patch(model, r=R, **options)
        handle.mode = "soft"
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(handle.parameters(), lr=0.01)
        logits(model, images()).square().mean().backward()
        optimizer.step()
        handles.append(handle)
    alone, handle = handles
    expected = alone.state_dict()
    for name, part in handle.state_dict().items():
        assert type(part) is Tensor
        torch.testing.assert_close(part, expected[name])
    handle.mode = "hard"
    handle.save_pretrained(tmp_path / "adapter.safetensors")
    loaded = dtem.from_pretrained(tmp_path / "adapter.safetensors", HOSTS[host]())
    with torch.no_grad():
        torch.testing.assert_close(logits(handle.model, images()), logits(loaded.model, images()))
    zeros = {name: torch.zeros_like(part) for name, part in loaded.method.state_dict().items()}
    handle.method.load_state_dict(zeros)
    assert not any(part.any() for part in handle.state_dict().values())
    with pytest.raises(DtemError, match="changed after patching"):
        handle.unpatch()
    assert handle.merger is handle.model.dtem


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("host", HOSTS)
def test_blocks_that_are_sharded_on_their_own_are_refused(host: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (1,)), HOSTS[host]()
    handle = dtem.patch(model, "tome", r=R)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        with pytest.raises(DtemError, match="fully_shard on the whole model only"):
            logits(model, images())
        handle.r = 0
        logits(model, images())
    with pytest.raises(DtemError, match=r"sharded \(fully_shard\); count it, or set a budget, before"):
        handle.r = "0.01G"
    other = HOSTS[host]()
    fully_shard(blocks_of(other)[0], mesh=mesh)
    with pytest.raises(DtemError, match=r"call dtem\.patch before fully_shard"):
        dtem.patch(other, r=R)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "wrapped"])
def test_checkpoints_of_the_host_load_strictly_both_ways(host: str, prefix: str) -> None:
    """A training script that saves before patching and resumes after it, and the other way round."""
    model = HOSTS[host]()
    before = copy.deepcopy(model.state_dict())
    dtem.patch(model, r=R)
    wrapped = nn.ModuleDict({"module": model}) if prefix else model
    assert wrapped.load_state_dict({prefix + name: part for name, part in before.items()}).missing_keys == []
    after = wrapped.state_dict()
    assert after.keys() == {prefix + name for name in before}
    fresh = nn.ModuleDict({"module": HOSTS[host]()}) if prefix else HOSTS[host]()
    fresh.load_state_dict(after)


def test_untrained_embeddings_follow_weights_that_are_loaded_later() -> None:
    weights = timm_vit().state_dict()
    weights["blocks.0.attn.qkv.weight"] = torch.randn_like(weights["blocks.0.attn.qkv.weight"])
    late, early = timm_vit(), timm_vit()
    handle = dtem.patch(late, r=R)
    late.load_state_dict(weights)
    early.load_state_dict(weights)
    expected = dtem.patch(early, r=R)
    for mine, theirs in zip(handle.method.parameters(), expected.method.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        next(handle.parameters()).add_(1.0)
    with pytest.warns(UserWarning, match="belong to the weights that it had before"):
        late.load_state_dict(weights)
    handle.unpatch().load_state_dict(weights)


@pytest.mark.parametrize("order", ["patch first", "patch after"])
@pytest.mark.parametrize("method", METHODS)
def test_set_input_size_changes_what_r_may_be(method: str, order: str) -> None:
    model = timm_vit()
    if order == "patch first":
        handle = dtem.patch(model, method, r=R)
    model.set_input_size((32, 32))
    if order == "patch after":
        handle = dtem.patch(model, method, r=R)
    assert handle.host.patches == 16
    assert handle.host.image == (3, 32, 32)
    assert handle.plan == (8, 4, 2)
    with pytest.raises(DtemError, match="at most 8"):
        handle.r = 9
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("order", ["patch first", "patch after"])
@pytest.mark.parametrize("method", METHODS)
def test_dynamic_image_sizes_and_another_head(method: str, order: str) -> None:
    model = timm_vit(dynamic_img_size=True)
    if order == "patch first":
        handle = dtem.patch(model, method, r=R)
    model.reset_classifier(3, "avg")
    if order == "patch after":
        handle = dtem.patch(model, method, r=R)
    assert handle.host.pooling == "mean"
    with torch.no_grad(), handle.trace() as trace:
        assert model(torch.randn(2, 3, 96, 64)).shape == (2, 3)
    assert trace.sizes[-1].sum(dim=1).tolist() == [97.0, 97.0]


@pytest.mark.parametrize("host", [*HOSTS, "Segmenter"])
def test_activation_checkpointing_gives_the_same_gradients(host: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = {**HOSTS, "Segmenter": segmenter}[host]()
        handle = dtem.patch(model, r=R)
        handle.mode = "soft"
        model.train().set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        logits(model, images()).square().sum().backward()
        gradients.append([parameter.grad for parameter in handle.parameters()])
    assert any(gradient is not None for gradient in gradients[0])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("build", ["mean", "attention"])
def test_lost_token_sizes_are_an_error(build: str) -> None:
    """A hook that copies hidden states drops the sizes that pooling goes by."""
    torch.manual_seed(0)
    tiny = {"image_size": 64, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    if build == "mean":
        model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**tiny, mlp_ratio=2)).eval()
        norm = model.dinov2.layernorm
    else:
        model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**tiny, intermediate_size=128)).eval()
        norm = model.get_submodule(
            "post_layernorm" if hasattr(model, "post_layernorm") else "vision_model.post_layernorm"
        )
    handle = dtem.patch(model, "tome", r=R)
    norm.register_forward_hook(lambda module, inputs, output: output * 1.0)
    with torch.no_grad():
        with pytest.raises(DtemError, match="lost their token sizes"):
            model(images())
        handle.r = 0
        model(images())


@pytest.mark.parametrize("spec", ["0.01G"])
def test_budgets_are_met_in_inference_mode_too(spec: str) -> None:
    outside = dtem.patch(timm_vit(), r=spec).plan
    assert any(outside)
    with torch.inference_mode():
        assert dtem.patch(timm_vit(), r=spec).plan == outside
        handle = dtem.patch(timm_vit())
        handle.r = spec
        assert handle.plan == outside
        assert dtem.count_flops(handle).to_dict() == dtem.count_flops(dtem.patch(timm_vit(), r=spec)).to_dict()


def test_timm_models_need_no_transformers() -> None:
    """In a process of its own: here the families of transformers are imported already."""
    code = """
import sys
sys.modules["transformers"] = None
import timm, dtem
print(dtem.patch(timm.create_model("test_vit"), "tome", r=2).host.family)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "timm_vit"


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dtem.integrations.hf_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(integrations, "INTEGRATIONS", copy.copy(integrations.INTEGRATIONS))
    monkeypatch.setattr(integrations.INTEGRATIONS, "_classes", {"hf_vit": "dtem.integrations.hf_vit:HfVit"})
    model = hf_vit()
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", None)
    with pytest.raises(DtemError, match=r"needs transformers 5\.18 or newer"):
        dtem.patch(model, "tome", r=R)
