"""Weights files of every kind that is around, and those that must not be opened."""

import argparse
import os
import pickle
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from dtem.errors import DtemError
from dtem.models.weights import load_weights


def tiny(seed: int = 0, **options: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**shape, **options})


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def write(content: object, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


WRAPPED = {
    "plain.safetensors": lambda state: state,
    "plain.pth": lambda state: state,
    "model.pth": lambda state: {"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1, data="there")},
    "state_dict.tar": lambda state: {"state_dict": state, "arch": "vit"},
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_weights_arrive(name: str, pool: str, tmp_path: Path) -> None:
    trained, model = tiny(1, global_pool=pool), tiny(2, global_pool=pool)
    assert ("fc_norm.weight" in trained.state_dict()) == (pool == "avg")  # as in official MAE checkpoints
    load_weights(model, write(WRAPPED[name](trained.state_dict()), tmp_path / name))
    assert_same(model, trained)


def test_distilled_models_too(tmp_path: Path) -> None:
    shape = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    trained, model = (timm.create_model("deit_tiny_distilled_patch16_224", **shape) for _ in range(2))
    load_weights(model, write({"model": trained.state_dict()}, tmp_path / "d.pth"))
    assert_same(model, trained)


def test_position_embeddings_are_resized(tmp_path: Path) -> None:
    trained, model = tiny(1), tiny(2, img_size=48)
    load_weights(model, write(trained.state_dict(), tmp_path / "w.pth"))
    assert torch.equal(model.head.weight, trained.head.weight)
    assert model.pos_embed.shape == (1, 145, 32)
    assert torch.equal(model.pos_embed[:, 0], trained.pos_embed[:, 0])


class Malicious:
    """Unpickling this runs a command."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_code_in_a_file_does_not_run(writer: str, tmp_path: Path) -> None:
    trace, path = tmp_path / "it-ran", tmp_path / "evil.pth"
    content = {"model": tiny().state_dict(), "extra": Malicious(trace)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DtemError, match=r"evil\.pth .*could run code"):
        load_weights(tiny(), path)
    assert not trace.exists()
    with path.open("rb") as file:
        torch.load(file, weights_only=False) if writer == "torch" else pickle.load(file)
    assert trace.exists()  # so it was there to be run


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {("extra.weight" if name == "head.bias" else name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        ({}, renamed, "missing head.bias; unknown extra.weight"),
        ({}, lambda state: {"a": torch.zeros(1)}, "missing cls_token, pos_embed, patch_embed.proj.weight and 29 more"),
        ({"global_pool": "avg"}, dict, "add global_pool = 'avg'"),
        ({"num_classes": 9}, dict, "head.weight is (9, 32), the model's (5, 32)"),
        ({"num_classes": 9}, dict, "add num_classes = 9"),
        ({"depth": 3}, dict, "unknown blocks.2.norm1.weight"),
        ({"embed_dim": 64}, dict, "does not fit the model"),
        ({}, lambda state: {**state, "epoch": 3}, "'epoch' is a int"),
        ({}, lambda state: [1, 2], "it is a list"),
        ({}, lambda state: {}, "holds no weights"),
    ],
)
def test_what_does_not_fit_is_named(options: dict, change, says: str, tmp_path: Path) -> None:
    path = write(change(tiny(1, **options).state_dict()), tmp_path / "named.pth")
    model = tiny(2)
    with pytest.raises(DtemError, match=re.escape(says)) as error:
        load_weights(model, path)
    assert "named.pth" in str(error.value)
    assert_same(model, tiny(2))  # refused whole


def test_class_token_weights_for_a_mean_pooled_model(tmp_path: Path) -> None:
    path = write(tiny(1).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(DtemError, match="add global_pool = 'token'"):
        load_weights(tiny(2, global_pool="avg"), path)


@pytest.mark.parametrize("name", ["cut.pth", "cut.safetensors", "text.pth", "text.safetensors", "empty.pth"])
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.startswith("cut"):
        write(tiny().state_dict(), path)
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.write_text("this is no checkpoint" if name.startswith("text") else "")
    with pytest.raises(DtemError, match=re.escape(name)):
        load_weights(tiny(), path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DtemError, match=r"nowhere\.pth"):
        load_weights(tiny(), tmp_path / "nowhere.pth")
