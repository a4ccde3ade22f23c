"""`dtem.show`: what it draws is what was merged, and foreground is what it says it is."""

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dtem
from dtem.data import images
from dtem.data.labels import class_name
from dtem.errors import DtemError
from dtem.models.segmenter import MaskDecoder, Segmenter
from dtem.visualise.class_attention import class_attention

TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 7}


def tiny(**settings: object) -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **settings}).eval()


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def test_a_segmenter_is_shown_with_the_classes_of_its_pixels(photo: Image.Image) -> None:
    segmenter = Segmenter(tiny(num_classes=0), MaskDecoder(32, 11, depth=1, heads=2)).eval()
    handle = dtem.patch(segmenter, "tome", r="40%")
    shown = dtem.show(handle, photo, labels="camvid")
    assert shown.classes.names[0] == "sky"
    assert shown.views["tome"].predicted.shape == (40, 50)
    with pytest.raises(DtemError, match="mask is for classifiers"):
        dtem.show(handle, photo, mask=photo)
    with pytest.raises(DtemError, match=r"labels = \['sky'\] must be camvid, voc, or a YAML file"):
        dtem.show(handle, photo, labels=["sky"])


def test_groups_are_those_of_a_forward_by_hand(photo: Image.Image) -> None:
    handle = dtem.patch(tiny(), "tome", r=6)
    shown = dtem.show(handle, photo)
    x = images.prepare(timm.data.resolve_data_config(model=handle.model) | {"input_size": (3, 32, 32)}, photo)
    with torch.no_grad(), handle.trace() as trace:
        logits = handle.model(x)
    view = shown.views["tome"]
    assert torch.equal(view.sources, torch.stack(trace.sources)[:, 0])
    assert view.tokens == (59, 53, 47)
    assert [view.num_groups(block) for block in range(3)] == [58, 52, 46]
    torch.testing.assert_close(view.probabilities, logits[0].softmax(0))
    handle.unpatch()
    with torch.no_grad():
        torch.testing.assert_close(shown.unmerged, handle.model(x)[0].softmax(0))


def test_nothing_of_the_handle_changes(photo: Image.Image) -> None:
    handle = dtem.patch(tiny(), "dtem", r="20%")
    handle.model.train()
    handle.mode = "soft"
    dtem.show(handle, photo)
    assert (handle.mode, handle.r, handle.model.training, handle.method.name) == ("soft", "20%", True, "dtem")


def test_class_attention_is_the_row_of_an_explicit_softmax() -> None:
    model = tiny()
    weights: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda _, __, out: weights.append(out))
    handle = dtem.patch(model, "tome", r=8)
    attention = class_attention(handle, torch.randn(2, 3, 32, 32))
    rows = []
    for qkv in weights:
        q, k, _ = qkv.view(2, 65, 3, 2, 16).permute(2, 0, 3, 1, 4)
        rows.append((q @ k.transpose(2, 3) / 4).softmax(-1)[:, :, 0, 1:].mean(1))
    expected = torch.stack(rows).mean(0)
    torch.testing.assert_close(attention, expected / expected.sum(1, keepdim=True))
    assert handle.r == 8
    assert handle.method.name == "tome"


def test_without_class_token_or_mask_there_is_no_foreground(photo: Image.Image) -> None:
    shown = dtem.show(dtem.patch(tiny(class_token=False, global_pool="avg"), r=4), photo)
    assert (shown.foreground, shown.foreground_by, shown.allocation("dtem")) == (None, None, None)
    assert shown.picture().width > 0


def test_a_mask_is_cropped_as_the_image_is() -> None:
    # 64 × 64 without margin at 32: a mask of the left half is the left half of the patches.
    image, mask = Image.new("RGB", (64, 64)), np.zeros((64, 64), dtype=bool)
    mask[:, :32] = True
    model = tiny()
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_pct": 1.0}
    shown = dtem.show(dtem.patch(model, r=4), image, mask=mask)
    assert shown.foreground_by == "the mask"
    assert shown.foreground.reshape(8, 8).tolist() == [[True] * 4 + [False] * 4] * 8
    with pytest.raises(DtemError, match=r"32 × 64.*64 × 64"):
        dtem.show(dtem.Handle(model), image, mask=mask[:, :32])


def test_files_and_notebooks(photo: Image.Image, tmp_path: Path) -> None:
    model = tiny()
    tome = dtem.patch(model, "tome", r=6)
    shown = dtem.show({"tome": tome, "again": tome}, photo)
    drawn = Image.open(io.BytesIO(shown._repr_png_()))
    assert drawn.size == shown.picture().size
    shown.save(tmp_path / "all.png", "all")
    with Image.open(tmp_path / "all.png") as every:
        assert every.width > drawn.width
    shown.save(tmp_path / "last.svg", "last")
    root = ElementTree.parse(tmp_path / "last.svg").getroot()
    assert len(root.findall("{*}image")) == 4  # two rows: image, groups
    assert shown.blocks([-1, 0]) == [2, 0]
    for wrong, match in (([3], "no block 4 .*has 3 blocks"), ("none", "'none' is not known")):
        with pytest.raises(DtemError, match=match):
            shown.blocks(wrong)
    with pytest.raises(DtemError, match=r"\.png or \.svg"):
        shown.save(tmp_path / "a.gif")


def test_a_model_is_compared_without_patching_it(photo: Image.Image, tmp_path: Path) -> None:
    model = tiny()
    shown = dtem.show(model, photo, methods="tome,evit", r=5, blocks="last")
    assert (list(shown.views), shown.drawn, shown.notes) == (["tome", "evit"], "last", ())
    assert all(view.r == "5" for view in shown.views.values())
    assert not hasattr(model, "dtem")
    assert shown.picture().size == shown.picture([2]).size
    named = dtem.show("digits_vit", photo)
    assert (named.adapters, named.views["dtem"].r, named.notes) == (("digits_vit.dtem.safetensors",), "16", ())
    (note,) = dtem.show(model, photo, methods=["dtem"], r=5).notes
    assert "untrained" in note


def test_what_does_not_go_together(photo: Image.Image) -> None:
    handle = dtem.patch(tiny(), r=4)
    for wrong, match in (
        ({"methods": "evit"}, "patched already"),
        ({"adapters": "digits_vit"}, "patched already"),
        ({"img_size": 32}, "img_size: these are for a model given by name"),
        ({"part": "mlp"}, "part = 'mlp' is for a Segmenter"),
        ({"short_side": 8}, "short_side = 8 is for a Segmenter"),
        ({"blocks": [7]}, "there is no block 8"),
    ):
        with pytest.raises(DtemError, match=match):
            dtem.show(handle, photo, **wrong)
    assert dtem.show(handle, photo, r=2).views["dtem"].r == "2"
    assert handle.r == 4


def test_grids_need_not_be_square(photo: Image.Image) -> None:
    assert dtem.show(dtem.patch(tiny(img_size=(32, 48)), r=4), photo).grid == (8, 12)


def test_models_must_be_the_same(photo: Image.Image) -> None:
    with pytest.raises(DtemError, match="compare methods on one model"):
        dtem.show({"a": dtem.patch(tiny()), "b": dtem.patch(tiny(depth=2))}, photo)
    with pytest.raises(DtemError, match="nothing to show"):
        dtem.show({}, photo)


def test_photographs_are_turned_upright() -> None:
    image = Image.new("RGB", (20, 10), "red")
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was held sideways
    content = io.BytesIO()
    image.save(content, "JPEG", exif=exif)
    assert images.open_image(content.getvalue()).size == (10, 20)


@pytest.mark.parametrize(
    "content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"x" * 50], ids=["empty", "text", "broken"]
)
def test_what_is_no_image_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.png"
    path.write_bytes(content)
    with pytest.raises(DtemError, match=r"bad\.png is .*PNG, JPEG or WebP"):
        images.open_image(path)


def test_a_truncated_file_is_damaged() -> None:
    content = io.BytesIO()
    Image.effect_noise((90, 90), 50).save(content, "PNG")
    with pytest.raises(DtemError, match="damaged"):
        images.open_image(content.getvalue()[:2000])


def test_images_have_a_largest_size() -> None:
    with pytest.raises(DtemError, match=r"30 × 20 pixels, .*0.0005 million"):
        images.open_image(Image.new("L", (30, 20)), pixels=500)
    with pytest.raises(DtemError, match="no image file"):
        images.open_image("nowhere.png")
    with pytest.raises(DtemError, match="float64"):
        images.open_image(np.zeros((3, 3)))


def test_classes_of_imagenet_have_names() -> None:
    model = torch.nn.Identity()
    model.num_classes = 1000
    assert class_name(model, 281) == "tabby"
    model.num_classes = 10
    assert class_name(model, 7) == "7"
