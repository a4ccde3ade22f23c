"""LV-ViT: its weights, its answer, and how it merges."""

import json
import math

import pytest
import timm
import torch
from torch import Tensor, nn

import dtem
import dtem.models
from contract.hosts import CLASSIFYING, fresh, images, patched, vit
from dtem import cli, ops
from dtem.models.weights import load_weights

TINY = {"width": 32, "depth": 4, "patch": 4, "patches": 64, "classes": 5}


def official(width: int = 384, depth: int = 16, patch: int = 16, patches: int = 196, classes: int = 1000):
    """Names and shapes of an official checkpoint, in its order."""
    yield "cls_token", (1, 1, width)
    yield "pos_embed", (1, patches + 1, width)
    for layer, shape in enumerate([(64, 3, 7, 7), (64, 64, 3, 3), (64, 64, 3, 3)], start=1):
        yield f"patch_embed.conv{layer}.weight", shape
        for name in ("weight", "bias", "running_mean", "running_var"):
            yield f"patch_embed.bn{layer}.{name}", (64,)
        yield f"patch_embed.bn{layer}.num_batches_tracked", ()
    yield "patch_embed.proj.weight", (width, 64, patch // 2, patch // 2)
    yield "patch_embed.proj.bias", (width,)
    for block in range(depth):
        parts = {
            "norm1": ((width,), True),
            "attn.qkv": ((3 * width, width), False),
            "attn.proj": ((width, width), True),
            "norm2": ((width,), True),
            "mlp.fc1": ((3 * width, width), True),
            "mlp.fc2": ((width, 3 * width), True),
        }
        for name, (shape, bias) in parts.items():
            yield f"blocks.{block}.{name}.weight", shape
            if bias:
                yield f"blocks.{block}.{name}.bias", shape[:1]
    for name, shape in (("norm", (width,)), ("head", (classes, width)), ("aux_head", (classes, width))):
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]


def checkpoint(**shape: int) -> dict[str, Tensor]:
    """A made-up checkpoint, with numbers at which every weight matters."""
    state = {}
    for name, size in official(**shape):
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(7)
        elif name.endswith("running_var"):
            state[name] = torch.rand(size) + 0.5
        elif name.endswith("weight") and len(size) > 1:
            state[name] = torch.randn(size) * 1.5 / math.sqrt(math.prod(size[1:]))
        else:
            state[name] = torch.randn(size) * 0.5 + ("weight" in name)
    return state


def test_official_names_and_shapes() -> None:
    with torch.device("meta"):
        model, state = timm.create_model("lvvit_s"), {name: torch.empty(size) for name, size in official()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in state.items()
    }
    model.load_state_dict(state, strict=True)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 26.15


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_official_file_is_loaded(tmp_path, wrapped: bool) -> None:
    state = checkpoint(**TINY)
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "lvvit.pth.tar")
    model = vit("lvvit_s")()
    load_weights(model, tmp_path / "lvvit.pth.tar")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    larger = vit("lvvit_s", img_size=48)()
    load_weights(larger, tmp_path / "lvvit.pth.tar")  # position embeddings are resized
    assert larger.pos_embed.shape == (1, 145, 32)
    assert torch.equal(larger.pos_embed[:, 0], state["pos_embed"][:, 0])


def written_out(state: dict[str, Tensor], image: Tensor, heads: int, depth: int, patch: int) -> Tensor:
    """Scores of one image out of a checkpoint, by the published formulas."""

    def normed(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    x = image[None]
    for layer in (1, 2, 3):
        mean, variance, scale, shift = (
            state[f"patch_embed.bn{layer}.{name}"].view(1, -1, 1, 1)
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        weight = state[f"patch_embed.conv{layer}.weight"]
        x = nn.functional.conv2d(x, weight, stride=2 if layer == 1 else 1, padding=weight.shape[-1] // 2)
        x = ((x - mean) / (variance + 1e-5).sqrt() * scale + shift).clamp(min=0.0)
    grid = nn.functional.unfold(x, patch // 2, stride=patch // 2)[0].T
    grid = grid @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    x = torch.cat([state["cls_token"][0], grid]) + state["pos_embed"][0]
    for block in range(depth):
        name = f"blocks.{block}"
        q, k, v = affine(normed(x, f"{name}.norm1"), f"{name}.attn.qkv").chunk(3, dim=1)
        seen = []
        for a, b, c in zip(q.chunk(heads, dim=1), k.chunk(heads, dim=1), v.chunk(heads, dim=1), strict=True):
            weights = (a @ b.T / math.sqrt(a.shape[1])).exp()
            seen.append(weights / weights.sum(dim=1, keepdim=True) @ c)
        x = x + affine(torch.cat(seen, dim=1), f"{name}.attn.proj") / 2
        hidden = affine(normed(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        hidden = hidden * (1 + (hidden / math.sqrt(2)).erf()) / 2
        x = x + affine(hidden, f"{name}.mlp.fc2") / 2
    x = normed(x, "norm")
    patches = affine(x[1:], "aux_head")
    best = torch.tensor([max(scores) for scores in patches.T.tolist()])
    return affine(x[0], "head") + 0.5 * best


def test_the_answer_is_the_published_one() -> None:
    state = checkpoint(**TINY)
    model = vit("lvvit_s")().eval()
    model.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = torch.stack([written_out(state, image, heads=2, depth=4, patch=4) for image in x])
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model.head(model.forward_features(x)[:, 0]), expected, atol=0.1), "patches count"


def test_one_r_means_the_first_three_quarters() -> None:
    with torch.device("meta"):
        handle = dtem.patch(timm.create_model("lvvit_s"), r=14)
    assert handle.plan == (14,) * 12 + (0,) * 4
    assert handle.tokens[-1] == 197 - 12 * 14
    handle.r = "10@-1"
    assert handle.plan[0] == 20
    assert handle.plan[11:] == (0,) * 5
    assert sum(handle.plan) == 115  # 20 (1 − l / 11), rounded down
    handle.r = 0.1
    assert handle.plan[:2] == (19, 17)
    assert handle.plan[12:] == (0,) * 4
    handle.r = "4G"
    assert min(handle.plan[:12]) > 0
    assert handle.plan[12:] == (0,) * 4
    handle.r = [0] * 15 + [9]
    assert handle.plan == (0,) * 15 + (9,)
    with pytest.raises(dtem.DtemError, match="16 blocks"):
        handle.r = [14] * 12


def test_what_never_merges_does_not_learn() -> None:
    _, handle = patched("lvvit", "dtem")
    learning = [all(p.requires_grad for p in embedding.parameters()) for embedding in handle.method.embeddings]
    assert learning == [True, True, True, False]


def test_a_schedule_comes_back_from_a_file(tmp_path) -> None:
    model, handle = patched("lvvit", "dtem", r=6)
    dtem.save_pretrained(handle, tmp_path / "lv.safetensors")
    again = dtem.from_pretrained(tmp_path / "lv.safetensors", fresh("lvvit"))
    assert again.plan == handle.plan == (6, 6, 6, 0)
    with torch.no_grad():
        assert torch.equal(again.model(images("lvvit")), model(images("lvvit")))


@pytest.mark.parametrize("method", sorted(set(CLASSIFYING) - {"patch_merger"}))  # its tokens hold no patches
def test_the_head_needs_no_unmerging(method: str) -> None:
    """The best token is the best patch of the full grid; patches that were dropped are not asked."""
    model, handle = patched("lvvit", method, r=[9, 9, 9, 0])
    x = images("lvvit", batch=4)
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        source = trace.sources[-1]
        scores = model.aux_head(ops.unmerge(features, source.clamp(min=0)))
        best = scores.masked_fill(source.lt(0).unsqueeze(-1), -torch.inf).amax(dim=1)
        expected = model.head(features[:, 0]) + 0.5 * best
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["dtem"])
def test_a_cold_temperature_makes_soft_hard(method: str) -> None:
    """In soft mode all tokens stay, but the head asks only those that inference has."""
    model, handle = patched("lvvit", method, r=6, temperature=1e-4, scale=1e-2)
    x = images("lvvit", batch=8)
    with torch.no_grad():
        hard = model(x)
        handle.mode = "soft"
        torch.testing.assert_close(model(x), hard, rtol=1e-3, atol=1e-3)
        features = model.forward_features(x)
        everyone = model.head(features[:, 0]) + 0.5 * model.aux_head(features[:, 1:]).amax(dim=1)
        assert not torch.allclose(everyone, hard, atol=1e-2), "tokens that were merged away would be heard"


def test_masked_patches_are_not_asked_in_training() -> None:
    model, handle = patched("lvvit", "dynamicvit", r=[0, 20, 0, 0], stages=(1,))
    handle.mode = "soft"
    handle.method.train()  # masks are drawn
    torch.manual_seed(0)
    x = images("lvvit", batch=8)
    with torch.no_grad(), handle.trace() as trace:
        features = model.forward_features(x)
    with torch.no_grad():
        scores = model.aux_head(features[:, 1:])
        present = trace.sizes[-1][:, 1:] > 0.5
        assert 0 < present.sum() < present.numel()
        best = torch.stack([image[alive].amax(dim=0) for image, alive in zip(scores, present, strict=True)])
        torch.testing.assert_close(model.best_patch(features), best)
        assert not torch.allclose(best, scores.amax(dim=1))


def test_features_without_their_sizes_are_refused() -> None:
    model, _ = patched("lvvit", "tome")
    with torch.no_grad(), pytest.raises(dtem.DtemError, match="no token sizes"):
        model.forward_head(model.forward_features(images("lvvit")).clone())


@pytest.mark.parametrize("merged", [True, False])
def test_new_heads(merged: bool) -> None:
    model = patched("lvvit", "tome")[0] if merged else fresh("lvvit")
    x = images("lvvit")
    model.reset_classifier(7)
    with torch.no_grad():
        assert model(x).shape == (2, 7)
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), model.forward_features(x)[:, 0])
        with pytest.raises(dtem.DtemError, match="'avg'"):
            model.reset_classifier(7, "avg")


@pytest.mark.parametrize(
    ("options", "said"), [({"global_pool": "avg"}, "'avg'.*best patch"), ({"dynamic_img_pad": True}, "pad")]
)
def test_what_it_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(dtem.DtemError, match=said):
        vit("lvvit_s", **options)()


def test_images_that_do_not_fit() -> None:
    with pytest.raises(dtem.DtemError, match=r"28×32.*32×32"):
        fresh("lvvit")(torch.zeros(1, 3, 28, 32))
    any_size = vit("lvvit_s", dynamic_img_size=True)().eval()
    with torch.no_grad():
        assert any_size(torch.zeros(1, 3, 24, 40)).shape == (1, 5)
    with pytest.raises(dtem.DtemError, match=r"30×32.*divide"):
        any_size(torch.zeros(1, 3, 30, 32))


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flops", "--model", "lvvit_s", "--r", "0,14", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == 197
    assert [row["plan"] for row in document["rows"]] == [[0] * 16, [14] * 12 + [0] * 4]
    assert cli.main(["flops", "--model", "lvvit_s", "--global-pool", "avg"]) == 2
    assert "best patch" in capsys.readouterr().err
