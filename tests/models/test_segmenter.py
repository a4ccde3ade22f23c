"""Segmenter: published weights, its answer by another way, images of any size, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor

from dtem.errors import DtemError
from dtem.models import segmenter
from dtem.models.segmenter import DECODERS, PRESETS, Segmenter, create, plain_encoder, resize_positions
from dtem.models.weights import load_weights

WIDTH, DEPTH, PATCH, SIDE, CLASSES = 64, 2, 8, 32, 5


def block(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    shapes |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
    found = {}
    for name, shape in shapes.items():
        found |= {f"{prefix}.{name}.weight": shape, f"{prefix}.{name}.bias": shape[:1]}
    for norm in ("norm1", "norm2"):
        found |= {f"{prefix}.{norm}.weight": (width,), f"{prefix}.{norm}.bias": (width,)}
    return found


def published(
    decoder: str, width: int, depth: int, patch: int, side: int, classes: int, distilled: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the official checkpoints, written down from the names of its modules."""
    patches = (side // patch) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.cls_token": (1, 1, width),
        "encoder.pos_embed": (1, patches + 1 + distilled, width),
        "encoder.patch_embed.proj.weight": (width, 3, patch, patch),
        "encoder.patch_embed.proj.bias": (width,),
        "encoder.norm.weight": (width,),
        "encoder.norm.bias": (width,),
        "encoder.head.weight": (1000, width),
        "encoder.head.bias": (1000,),
    }
    if distilled:
        shapes |= {"encoder.dist_token": (1, 1, width)}
        shapes |= {"encoder.head_dist.weight": (1000, width), "encoder.head_dist.bias": (1000,)}
    for layer in range(depth):
        shapes |= block(f"encoder.blocks.{layer}", width)
    if decoder == "linear":
        return shapes | {"decoder.head.weight": (classes, width), "decoder.head.bias": (classes,)}
    shapes |= {
        "decoder.cls_emb": (1, classes, width),
        "decoder.proj_patch": (width, width),
        "decoder.proj_classes": (width, width),
        "decoder.proj_dec.weight": (width, width),
        "decoder.proj_dec.bias": (width,),
        "decoder.decoder_norm.weight": (width,),
        "decoder.decoder_norm.bias": (width,),
        "decoder.mask_norm.weight": (classes,),
        "decoder.mask_norm.bias": (classes,),
    }
    for layer in range(2):
        shapes |= block(f"decoder.blocks.{layer}", width)
    return shapes


def weights(decoder: str = "mask", distilled: bool = False) -> dict[str, Tensor]:
    """Numbers at which every weight matters."""
    shapes = published(decoder, WIDTH, DEPTH, PATCH, SIDE, CLASSES, distilled)
    return {
        name: torch.randn(shape) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5) for name, shape in shapes.items()
    }


def by_hand(state: dict[str, Tensor], images: Tensor, prefix: int = 1) -> Tensor:
    """The forward of the paper, from the weights alone. Images have the size that positions are for."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def through(name: str, x: Tensor) -> Tensor:
        heads = WIDTH // 64
        h = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x))
        q, k, v = (part.unflatten(-1, (heads, 64)).transpose(1, 2) for part in h.chunk(3, dim=-1))
        y = (q @ k.mT / 8.0).softmax(-1) @ v
        x = x + linear(f"{name}.attn.proj", y.transpose(1, 2).flatten(2))
        h = linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", x))
        return x + linear(f"{name}.mlp.fc2", h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))

    x = F.conv2d(images, state["encoder.patch_embed.proj.weight"], state["encoder.patch_embed.proj.bias"], stride=PATCH)
    rows, columns = x.shape[2:]
    tokens = [state[f"encoder.{name}"].expand(len(images), -1, -1) for name in ("cls_token", "dist_token")[:prefix]]
    x = torch.cat([*tokens, x.flatten(2).mT], dim=1) + state["encoder.pos_embed"]
    for layer in range(DEPTH):
        x = through(f"encoder.blocks.{layer}", x)
    x = norm("encoder.norm", x)[:, prefix:]
    if "decoder.head.weight" in state:
        scores = linear("decoder.head", x)
    else:
        x = linear("decoder.proj_dec", x)
        x = torch.cat([x, state["decoder.cls_emb"].expand(len(images), -1, -1)], dim=1)
        for layer in range(2):
            x = through(f"decoder.blocks.{layer}", x)
        x = norm("decoder.decoder_norm", x)
        patches, classes = (
            x[:, :-CLASSES] @ state["decoder.proj_patch"],
            x[:, -CLASSES:] @ state["decoder.proj_classes"],
        )
        patches, classes = (part / part.norm(dim=-1, keepdim=True) for part in (patches, classes))
        scores = norm("decoder.mask_norm", patches @ classes.mT)
    maps = scores.mT.unflatten(2, (rows, columns))
    return F.interpolate(maps, scale_factor=PATCH, mode="bilinear", align_corners=False)


@pytest.mark.parametrize(("decoder", "distilled"), [("mask", False), ("linear", False), ("mask", True)])
def test_published_weights_give_the_published_logits(decoder: str, distilled: bool, tmp_path, monkeypatch) -> None:
    state = weights(decoder, distilled)
    if distilled:
        monkeypatch.setattr(segmenter, "VisionTransformer", VisionTransformerDistilled)
    model = tiny(decoder)
    torch.save({"model": state, "n_cls": CLASSES} if decoder == "linear" else state, tmp_path / "seg.pth")
    load_weights(model, tmp_path / "seg.pth")
    images = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(model(images), by_hand(state, images, 1 + distilled), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "side"), [("seg_t_mask_16", 512), ("seg_s_linear_16", 512), ("seg_l_mask_16", 640)])
def test_presets_have_the_published_names_and_shapes(name: str, side: int) -> None:
    width, depth, _ = segmenter.SIZES[name.split("_")[1]]
    with torch.device("meta"):
        model = create(name)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    wanted = published(name.split("_")[2], width, depth, 16, side, 150)
    assert own == {key: shape for key, shape in wanted.items() if not key.startswith("encoder.head")}
    assert len(PRESETS) == 8


def tiny(decoder: str = "mask", image: tuple[int, int] = (SIDE, SIDE)) -> Segmenter:
    return Segmenter(plain_encoder(WIDTH, DEPTH, PATCH, image), DECODERS[decoder](WIDTH, CLASSES)).eval()


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (33, 47), (8, 8)])
def test_any_image_size(size: tuple[int, int]) -> None:
    with torch.no_grad():
        assert tiny()(torch.randn(1, 3, *size)).shape == (1, CLASSES, *size)


def test_padding_is_at_the_right_and_below() -> None:
    """What is cut off again stands in patches of its own where sizes are off by whole patches."""
    model, images = tiny("linear"), torch.randn(1, 3, 31, 32)
    padded = torch.cat([images, torch.zeros(1, 3, 1, 32)], dim=2)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(padded)[:, :, :31])


def test_positions_are_resized_bilinearly_and_prefix_stays() -> None:
    positions = torch.randn(1, 1 + 16, 3)
    assert resize_positions(positions, (4, 4), (4, 4), 1) is positions
    resized = resize_positions(positions, (4, 4), (8, 4), 1)
    assert resized.shape == (1, 33, 3)
    assert torch.equal(resized[:, 0], positions[:, 0])
    grid, old = resized[0, 1:].view(8, 4, 3), positions[0, 1:].view(4, 4, 3)
    torch.testing.assert_close(grid[0], old[0])  # half-pixel centres: the border stays
    torch.testing.assert_close(grid[1], 0.75 * old[0] + 0.25 * old[1])
    torch.testing.assert_close(grid[2], 0.25 * old[0] + 0.75 * old[1])


def test_weights_of_another_grid_are_fitted(tmp_path) -> None:
    state, model = weights(), tiny(image=(48, 32))
    save_file(state, tmp_path / "seg.safetensors")
    load_weights(model, tmp_path / "seg.safetensors")
    torch.testing.assert_close(
        model.encoder.pos_embed.detach(), resize_positions(state["encoder.pos_embed"], (4, 4), (6, 4), 1)
    )


def test_encoder_alone(tmp_path) -> None:
    state = {name.removeprefix("encoder."): part for name, part in weights().items() if name.startswith("encoder.")}
    save_file(state, tmp_path / "vit.safetensors")
    model = tiny()
    before = {name: part.clone() for name, part in model.decoder.state_dict().items()}
    load_weights(model, tmp_path / "vit.safetensors", part="encoder.")
    torch.testing.assert_close(model.encoder.blocks[1].mlp.fc1.weight.detach(), state["blocks.1.mlp.fc1.weight"])
    assert all(torch.equal(part, before[name]) for name, part in model.decoder.state_dict().items())


def test_a_file_that_does_not_fit_changes_nothing(tmp_path) -> None:
    model = tiny()
    before = {name: part.clone() for name, part in model.state_dict().items()}
    state = weights()
    for changed, said in (
        ({k: v for k, v in state.items() if k != "encoder.norm.bias"}, "missing encoder.norm.bias"),
        (state | {"moon": torch.ones(1)}, "unknown moon"),
        (state | {"encoder.norm.bias": torch.ones(3)}, r"encoder.norm.bias is \(3,\)"),
        (state | {"encoder.pos_embed": torch.ones(1, 7, WIDTH)}, "not a square grid"),
    ):
        save_file(changed, tmp_path / "seg.safetensors")
        with pytest.raises(DtemError, match=rf"seg.safetensors.*{said}"):
            load_weights(model, tmp_path / "seg.safetensors")
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    (tmp_path / "broken.pth").write_bytes(b"not weights")
    with pytest.raises(DtemError, match=r"broken.pth is damaged"):
        load_weights(model, tmp_path / "broken.pth")


def test_refusals() -> None:
    with pytest.raises(DtemError, match="multiple of the patch size"):
        create("seg_t_mask_16", img_size=(250, 320))
    with pytest.raises(DtemError, match=r"expected images .* got \(1, 1, 32, 32\)"):
        tiny()(torch.randn(1, 1, 32, 32))
