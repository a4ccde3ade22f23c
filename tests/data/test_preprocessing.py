"""The preprocessing of a model: never a guess."""

import pytest
import timm

import dtem
from dtem.data.preprocessing import resolve_data_config
from dtem.errors import DtemError


def test_the_size_is_that_of_the_model_as_it_was_built() -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=(32, 48), depth=1)
    config = resolve_data_config(model)
    assert config["input_size"] == (3, 32, 48)
    dtem.patch(model, r=1)
    assert resolve_data_config(model) == config


def test_a_model_of_transformers_says_it_itself_or_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **sizes))
    with pytest.raises(DtemError, match="processor of transformers"):
        resolve_data_config(model)
    model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert resolve_data_config(model)["mean"] == (0.5,) * 3
