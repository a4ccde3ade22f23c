"""`create_model` and `list_models`: every kind of name, and what is refused in ordinary English."""

import json
import socket
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import dtem
from dtem import integrations
from dtem.errors import DtemError
from dtem.models import factory, hub
from dtem.models.lvvit import LvVit
from dtem.models.segmenter import Segmenter
from tasks.captioning.small import write_captioner

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def equal(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_own_models_by_name() -> None:
    assert isinstance(dtem.create_model("lvvit_s", pretrained=False), LvVit)
    segmenter = dtem.create_model("seg_t_linear_16", pretrained=False, num_classes=3, img_size=(32, 64))
    assert isinstance(segmenter, Segmenter)
    assert (segmenter.num_classes, segmenter.pretrained_cfg["input_size"]) == (3, (3, 32, 64))
    first, second = (dtem.create_model("digits_vit") for _ in range(2))
    assert equal(first, second.state_dict())
    assert not equal(dtem.create_model("digits_vit", pretrained=False), first.state_dict())


def test_models_are_in_eval_mode_with_their_options() -> None:
    model = dtem.create_model(
        "test_vit", pretrained=False, num_classes=5, img_size=64, global_pool="avg", drop_path_rate=0.2
    )
    assert not model.training
    assert (model.num_classes, model.global_pool, model.patch_embed.img_size) == (5, "avg", (64, 64))
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


def test_a_folder_of_transformers(vit_folder: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(vit_folder).state_dict()
    assert equal(dtem.create_model(str(vit_folder)), saved)
    assert equal(dtem.create_model(f"hf:{vit_folder}"), saved)
    assert not equal(dtem.create_model(str(vit_folder), pretrained=False), saved)
    larger = dtem.create_model(str(vit_folder), pretrained=False, img_size=64, num_classes=7)
    assert dtem.patch(larger, r=4).host.image == (3, 64, 64)
    assert larger.config.num_labels == 7


def test_a_captioner_has_its_tokenizer(tmp_path: Path) -> None:
    name = str(write_captioner(tmp_path / "git"))
    model = dtem.create_model(name)
    assert model.tokenizer("a dog").input_ids
    assert model.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    state = {key: tensor + 1 for key, tensor in model.state_dict().items() if tensor.is_floating_point()}
    torch.save(model.state_dict() | state, tmp_path / "weights.pth")
    trained = dtem.create_model(name, weights=tmp_path / "weights.pth")
    assert trained.tokenizer("a dog").input_ids
    assert equal(trained, model.state_dict() | state)
    with pytest.raises(DtemError, match=r"img_size: the captioner .* has a fixed configuration"):
        dtem.create_model(name, img_size=64)
    assert dtem.count_flops(name, r=[3, 9]).tokens == 65
    report = dtem.benchmark(name, r=9, batch_size=1, rounds=1, warmup=0, progress=False)
    assert report.rows[1].macs_ratio > 1


def test_weights_from_a_file(vit_folder: Path, tmp_path: Path) -> None:
    for name in ("test_vit", str(vit_folder), "digits_vit", "seg_t_linear_16"):
        trained = dtem.create_model(name, pretrained=False).state_dict()
        path = tmp_path / "weights.safetensors"
        save_file(trained, path)
        assert equal(dtem.create_model(name, weights=path), trained), name


def test_encoder_weights_of_a_segmenter(tmp_path: Path) -> None:
    encoder = timm.create_model("vit_tiny_patch16_224", img_size=512).state_dict()
    save_file(encoder, tmp_path / "vit.safetensors")
    model = dtem.create_model("seg_t_mask_16", encoder_weights=tmp_path / "vit.safetensors", pixel_norm="imagenet")
    assert torch.equal(model.encoder.blocks[3].mlp.fc1.weight, encoder["blocks.3.mlp.fc1.weight"])
    assert model.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deit_smal_patch16_224", {}, "did you mean deit_small_patch16_224"),
        ("zzzzzzzz", {}, "list_models"),
        ("deit_tiny_patch16_224.nothing", {}, "nothing"),
        ("./nowhere", {}, "there is no folder ./nowhere"),
        ("some/deep/folder", {}, "there is no folder some/deep/folder"),
        ("~/nowhere-at-all", {}, "there is no folder /"),
        (".", {}, "no config.json|cannot build"),
        ("test_vit", {"img_size": 150}, "150x150 is not a multiple of the patch size, 16"),
        ("test_vit", {"pixel_norm": "half"}, "pixel_norm = 'half' is for a Segmenter"),
        ("test_vit", {"encoder_weights": Path("a.pth")}, "encoder_weights = 'a.pth' is for a Segmenter"),
        ("digits_vit", {"img_size": 32}, "img_size: digits_vit has a fixed configuration"),
        ("seg_t_mask_16", {"global_pool": "avg"}, "global_pool = 'avg' is for classifiers"),
        ("seg_t_mask_16", {"pixel_norm": "zero"}, "pixel_norm = 'zero' is not known; choose one of: half, imagenet"),
        ("seg_t_mask_16", {"num_classes": 0}, "num_classes = 0: a Segmenter needs classes"),
        ("seg_t_mask_16", {"img_size": 100}, "img_size = 100x100 is not a multiple"),
        ("seg_t_mask_16", {"weights": "a.pth", "encoder_weights": "b.pth"}, "leave encoder_weights out"),
        ("test_vit", {"weights": "nowhere.pth"}, "there is no weights file nowhere.pth"),
    ],
)
def test_mistakes_are_named(name: str, options: dict, message: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DtemError, match=message):
        dtem.create_model(name, **({"pretrained": False} | options))


def test_a_segmenter_has_nothing_to_download() -> None:
    with pytest.raises(DtemError, match=r"give weights = FILE .*, encoder_weights = FILE .*, or pretrained = False"):
        dtem.create_model("seg_t_mask_16")


@pytest.mark.parametrize("options", [{"img_size": (32, 64)}, {"global_pool": "avg"}])
def test_what_models_of_transformers_refuse(vit_folder: Path, options: dict) -> None:
    with pytest.raises(DtemError, match=next(iter(options))):
        dtem.create_model(str(vit_folder), **options)


def test_a_folder_without_a_known_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["NoSuchModel"]}))
    with pytest.raises(DtemError, match="names no model class of transformers"):
        dtem.create_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_vit", r"the weights of test_vit cannot be downloaded \(no network\): .* weights = FILE"),
        ("hf-hub:timm/nothing", "no network|cannot build"),
        ("hf:nobody/nothing", "the Hub's model nobody/nothing is not in the cache, and the Hub cannot be reached"),
        ("nobody/nothing", "there is no folder nobody/nothing"),
    ],
)
def test_without_a_network_it_fails_at_once(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    start = time.monotonic()
    with pytest.raises(DtemError, match=message):
        dtem.create_model(name)
    assert time.monotonic() - start < 5


def test_the_hub_is_offline_only_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for reachable in (True, False):
        monkeypatch.setattr(hub, "_reachable", lambda _url, reachable=reachable: reachable)
        with hub.offline_without_network() as online:
            assert (online, constants.HF_HUB_OFFLINE) == (reachable, not reachable)
        assert not constants.HF_HUB_OFFLINE


def test_list_models() -> None:
    names = dtem.list_models()
    assert names == sorted(set(names))
    assert {"deit_tiny_patch16_224", "lvvit_s", "seg_s_mask_16", "digits_vit", "eva02_tiny_patch14_224"} <= set(names)
    assert dtem.list_models("deit3_small*") == ["deit3_small_patch16_224", "deit3_small_patch16_384"]
    assert dtem.list_models("resnet*") == []


def supported(name: str) -> bool:
    with torch.device("meta"):
        model = timm.create_model(name)
    try:
        integrations.find(model)
    except DtemError:
        return False
    return True


CANDIDATES = sorted({name for module in factory._TIMM_MODULES for name in timm.list_models(module=module)})
SMALL = [name for name in CANDIDATES if "tiny" in name or "small" in name or "wee" in name or "test_" in name]


@pytest.mark.parametrize("part", [SMALL, pytest.param(CANDIDATES, marks=pytest.mark.slow)], ids=["small", "all"])
def test_listed_models_are_those_that_can_be_patched(part: list[str]) -> None:
    assert [name for name in part if supported(name)] == [name for name in part if name in dtem.list_models()]
