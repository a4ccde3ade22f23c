"""What users do to a model after patching it: it works, or an error or a warning says why not."""

import copy
import io
import threading
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import dtem
from contract.test_composition import HOSTS, R, blocks_of, dispatched, hf_vit, images, logits, segmenter, timm_vit
from contract.test_composition import TOOLS as COMPOSITION
from dtem.errors import DtemError

pytestmark = pytest.mark.contract

EVERY = {**HOSTS, "Segmenter": segmenter}


def trained(handle: dtem.Handle) -> dtem.Handle:
    """As after a step of an optimiser."""
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return handle


@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["embeddings", "norms too"])
@pytest.mark.parametrize("host", EVERY)
def test_one_state_dict_of_host_and_method_loads_strictly(host: str, options: dict[str, bool]) -> None:
    model, fresh = EVERY[host](), EVERY[host]()
    handle = trained(dtem.patch(model, r=R, **options))
    state = copy.deepcopy({**handle.state_dict(), **model.state_dict()})
    dtem.patch(fresh, r=R, **options)
    with torch.no_grad():
        next(iter(fresh.parameters())).add_(1.0)
    assert fresh.load_state_dict(state, strict=True).missing_keys == []
    with torch.no_grad():
        assert torch.equal(logits(fresh, images()), logits(model, images()))


def test_trained_parameters_that_a_state_dict_leaves_out_are_named_once() -> None:
    model = timm_vit()
    handle = dtem.patch(model, r=R)
    model.state_dict()  # nothing is trained yet
    trained(handle)
    with pytest.warns(UserWarning, match=r"not in it. Save them with handle.save_pretrained"):
        model.state_dict()
    model.state_dict()  # once


@pytest.mark.parametrize("case", ["saved", "read", "loaded", "converted", "quantised", "copied", "exported"])
def test_state_dicts_are_not_warned_of_without_need(case: str, tmp_path) -> None:
    model = timm_vit()
    handle = dtem.patch(model, r=R)
    if case in ("saved", "loaded"):
        trained(handle).save_pretrained(tmp_path / "adapter.safetensors")
        if case == "loaded":
            dtem.from_pretrained(tmp_path / "adapter.safetensors", handle.unpatch())
    elif case == "read":
        trained(handle).state_dict()
    elif case == "converted":
        model.half().float()
    elif case == "quantised":
        model = COMPOSITION["torch.ao dynamic int8"](model)
    elif case == "copied":
        model = copy.deepcopy(model)
    elif case == "exported":
        trained(handle)
        model.state_dict(keep_vars=True)
        return
    model.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_tracing_is_refused() -> None:
    model = timm_vit()
    handle = dtem.patch(model, "tome", r=R)
    with pytest.raises(DtemError, match=r"export with dtem\.export"):
        torch.jit.trace(model, images(1))
    with pytest.raises(DtemError, match=r"export with dtem\.export"):
        torch.onnx.export(model, (images(1),), io.BytesIO(), dynamo=False)
    handle.r = 0
    torch.jit.trace(model, images(1))


def test_the_schedule_belongs_to_the_model_not_to_a_thread() -> None:
    handle = dtem.patch(timm_vit(), "tome", r=R)
    seen = []
    with handle.at(r=4):
        thread = threading.Thread(target=lambda: seen.append(handle.r))
        thread.start()
        thread.join()
    assert seen == [4]


@pytest.mark.parametrize("part", ["", "attn", "attention", "self_attn"])
@pytest.mark.parametrize("change", ["hook", "pre-hook", "forward"])
@pytest.mark.parametrize("host", EVERY)
def test_hooks_that_have_no_effect_are_named_once(host: str, change: str, part: str) -> None:
    model = EVERY[host]()
    block = blocks_of(model)[1]
    if part and not hasattr(block, part):
        return
    handle = dtem.patch(model, "tome", r=R)
    module = getattr(block, part) if part else block
    if change == "hook":
        module.register_forward_hook(lambda *_: None)
    elif change == "pre-hook":
        module.register_forward_pre_hook(lambda *_: None)
    else:
        module.forward = module.forward
    with torch.no_grad():
        with handle.at(r=0):
            logits(model, images())
        with pytest.warns(UserWarning, match=f"{type(module).__name__} of block 1 has hooks or a forward of its own"):
            logits(model, images())
        logits(model, images())  # once


@pytest.mark.parametrize("host", HOSTS)
def test_hooks_of_accelerate_are_not_warned_of(host: str) -> None:
    import accelerate

    model = HOSTS[host]()
    handle = dtem.patch(model, "tome", r=R)
    with torch.no_grad():
        expected = logits(model, images())
        dispatched(model)
        for block in blocks_of(model):
            accelerate.hooks.add_hook_to_module(block, accelerate.hooks.AlignDevicesHook("cpu"), append=True)
        torch.testing.assert_close(logits(model, images()), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(DtemError, match="offloaded or dispatched"):
        handle.r = "0.01G"


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
def test_outputs_that_the_config_asks_for_are_refused(output: str) -> None:
    config = hf_vit().config
    config._attn_implementation = "eager"
    model = transformers.ViTForImageClassification(config).eval()
    handle = dtem.patch(model, "tome", r=R)
    setattr(model.config, output, True)
    with torch.no_grad():
        with pytest.raises(DtemError, match=f"{output} needs every token in its place"):
            model(images())
        assert model(images(), **{output: False}).logits.shape == (4, 2)
        handle.r = 0
        assert len(getattr(model(images()), output.removeprefix("output_"))) >= 3
        setattr(model.config, output, False)
        handle.r = R
        model(images())  # transformers leaves its hooks: no warning


@pytest.mark.parametrize("options", [{}, {"norms": True}], ids=["embeddings", "norms too"])
@pytest.mark.parametrize("host", [name for name in EVERY if name != "timm"])
def test_embeddings_follow_weights_that_are_loaded_into_the_encoder(host: str, options: dict[str, bool]) -> None:
    model, early = EVERY[host](), EVERY[host]()
    name = {"transformers": "vit", "CLIP": "vision_model", "Segmenter": "encoder"}[host]
    weights = {key: part + 0.1 * torch.randn_like(part) for key, part in early.get_submodule(name).state_dict().items()}
    handle = dtem.patch(model, r=R, **options)
    model.get_submodule(name).load_state_dict(weights)
    early.get_submodule(name).load_state_dict(weights)
    expected = dtem.patch(early, r=R, **options)
    for mine, theirs in zip(handle.method.parameters(), expected.method.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    trained(handle)
    with pytest.warns(UserWarning, match="belong to the weights that it had before") as caught:
        model.get_submodule(name).load_state_dict(weights)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="belong to the weights that it had before") as caught:
        model.load_state_dict(early.state_dict())
    assert len(caught) == 1
    state = {**handle.state_dict(), **model.state_dict()}
    model.load_state_dict(state)
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="belong to the weights"):
        copied.get_submodule(name).load_state_dict(weights)
    handle.unpatch()
    model.get_submodule(name).load_state_dict(weights)
    model.load_state_dict(early.state_dict())
    for module in model.modules():
        hooks = (*module._load_state_dict_post_hooks.values(), *module._load_state_dict_pre_hooks.values())
        assert not any("dtem" in str(hook) for hook in hooks)


@pytest.mark.parametrize("host", EVERY)
def test_another_number_of_blocks_is_refused(host: str) -> None:
    model = EVERY[host]()
    handle = dtem.patch(model, "tome", r=R)
    parents = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = next(part for part in parents if list(part._modules.values()) == blocks_of(model))
    blocks.add_module("3", copy.deepcopy(blocks[0]))
    with torch.no_grad():
        with pytest.raises(DtemError, match="has 4 blocks, but had 3 when it was patched"):
            logits(model, images())
        handle.r = 0
        logits(model, images())


def test_a_pruned_model_is_refused() -> None:
    model = timm_vit()
    dtem.patch(model, "tome", r=R)
    model.prune_intermediate_layers([1])
    with pytest.raises(DtemError, match="has 2 blocks, but had 3"):
        model.forward_features(images())


def test_another_image_size_of_an_encoder_is_refused() -> None:
    model = segmenter()
    handle = dtem.patch(model, "tome", r=R)
    model.encoder.set_input_size((32, 32))
    with torch.no_grad():
        with pytest.raises(DtemError, match="image size was changed after patching"):
            model(images())
        dtem.patch(handle.unpatch(), "tome", r=R)
        model(images())


def test_a_pooling_without_soft_mode_is_refused_in_soft_mode() -> None:
    model = timm_vit()
    handle = dtem.patch(model, r=R)
    handle.mode = "soft"
    with pytest.raises(DtemError, match="max pooling has no soft mode"):
        model.reset_classifier(5, "max")
    assert (model.num_classes, model.global_pool) == (7, "token")
    handle.mode = "hard"
    model.reset_classifier(5, "max")
    assert handle.host.pooling == "max"


@pytest.mark.parametrize("r", [25, "0.005G"])
def test_an_image_size_that_r_does_not_fit_leaves_r_at_zero(r: object) -> None:
    model = timm_vit()
    handle = dtem.patch(model, "tome", r=25)
    if r != 25:
        handle.merger.requested_r = r  # a budget of the larger image
        size = (128, 128)
    else:
        size = (16, 16)
    with pytest.raises(DtemError, match="so r is 0 now"):
        model.set_input_size(size)
    assert (handle.r, handle.plan) == (0, (0, 0, 0))
    with torch.no_grad():
        assert model(torch.randn(1, 3, *size)).shape == (1, 7)


@pytest.mark.parametrize("options", [{}, {"init": "random"}, {"norms": True}], ids=["keys", "random", "norms"])
@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_a_model_patched_without_weights_gets_them_later(way: str, options: dict[str, object]) -> None:
    source = timm_vit()
    tiny = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 7}
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **tiny).eval()
    handle = dtem.patch(model, r=R, **options)
    if way == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=way == "assign")
    expected = dtem.patch(source, r=R, **options)
    for mine, theirs in zip(handle.method.parameters(), expected.method.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    with torch.no_grad():
        assert torch.equal(model(images()), source(images()))


@pytest.mark.parametrize("host", EVERY)
def test_a_model_patched_in_inference_mode_can_be_trained(host: str) -> None:
    model = EVERY[host]()
    with torch.inference_mode():
        handle = dtem.patch(model, r=R, norms=True)
    handle.mode = "soft"
    logits(model, images()).square().mean().backward()
    torch.optim.SGD(handle.parameters(), lr=0.1).step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["torchao int8 weight-only", "torchao int8 dynamic", "torch.ao dynamic int8"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_adapter_that_was_quantised_cannot_be_saved(host: str, tool: str, tmp_path) -> None:
    handle = dtem.patch(HOSTS[host](), r=R)
    state = handle.method.state_dict()
    quantised = dtem.Handle(COMPOSITION[tool](handle.model))
    for action in (
        lambda: quantised.save_pretrained(tmp_path / "adapter.safetensors"),
        lambda: quantised.method.load_state_dict(state),
        quantised.state_dict,
    ):
        with pytest.raises(DtemError, match="was quantised along with its host"):
            action()


def test_an_offloaded_adapter_says_so(tmp_path) -> None:
    handle = dtem.patch(timm_vit(), r=R)
    COMPOSITION["cpu_offload"](handle.model)
    with pytest.raises(DtemError, match="has no values here"):
        handle.save_pretrained(tmp_path / "adapter.safetensors")
    with pytest.raises(DtemError, match=r"offloaded or dispatched \(accelerate\)"):
        handle.r = "0.01G"


def eva() -> nn.Module:
    torch.manual_seed(0)
    tiny = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 7}
    return timm.create_model("eva02_tiny_patch14_224", **tiny).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tool", "reason"),
    [("cpu_offload", "its own biases are not loaded"), ("torch.ao dynamic int8", "leave attn.qkv out")],
)
def test_eva_says_which_tools_it_cannot_take(tool: str, reason: str) -> None:
    model = eva()
    dtem.patch(model, "tome", r=R)
    model = COMPOSITION[tool](model)
    with torch.no_grad(), pytest.raises(DtemError, match=reason):
        model(images())


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_counting_names_a_hook_that_fails(change: str) -> None:
    model = timm_vit()
    handle = dtem.patch(model, "tome", r=R)
    norm = model.blocks[0].norm1
    read: Callable[[Tensor], float] = lambda x: x.mean().item()  # noqa: E731
    if change == "hook":
        norm.register_forward_hook(lambda module, inputs, output: print(read(output)))
    else:
        forward = norm.forward
        norm.forward = lambda x: forward(x) + read(x)
    with pytest.raises(DtemError, match="LayerNorm has a forward") as caught:
        dtem.count_flops(handle)
    assert "quantis" not in str(caught.value)


def test_a_plain_model_warns_of_nothing() -> None:
    model = timm_vit()
    handle = dtem.patch(model, r=R)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
        model(images())
        model.load_state_dict(timm_vit().state_dict())
        handle.unpatch()


def test_averaged_models_average_the_method_too() -> None:
    model = timm_vit()
    handle = dtem.patch(model, r=R)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    before = next(handle.parameters()).clone()
    trained(handle)
    average.update_parameters(model)
    mine, theirs = next(handle.parameters()), next(dtem.Handle(average.module).parameters())
    torch.testing.assert_close(theirs, (before + mine) / 2)
