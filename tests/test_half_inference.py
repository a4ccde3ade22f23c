"""bfloat16 and float16 at inference: near float32, and the same tokens merge except where two edges nearly tie."""

import pytest
import timm
import torch
from safetensors.torch import load_file

import dtem
from benchmarks import precision
from contract.hosts import fresh, images

SAME = {torch.bfloat16: 0.75, torch.float16: 0.95}
"""Share of merged tokens that must be the same, partner included; most of the rest must be near ties (`NEAR`)."""
LOGITS = {torch.bfloat16: 0.1, torch.float16: 0.02}  # of the range of logits


@pytest.mark.parametrize("dtype", SAME, ids=str)
@pytest.mark.parametrize(("name", "method"), [("deit", "dtem"), ("mae", "tome"), ("dinov2_registers", "dtem")])
def test_tiny_models(name: str, method: str, dtype: torch.dtype) -> None:
    model = fresh(name)
    dtem.patch(model, method, r=9)
    drift = precision.probe(model, images(name, 4), dtype)
    assert drift["merged_the_same"] > SAME[dtype]
    assert drift["not_near"] < 0.02
    assert drift["typical_difference"] < LOGITS[dtype] * drift["logit_range"]


@pytest.mark.parametrize("dtype", SAME, ids=str)
def test_deit_tiny_on_photographs(data_dir, dtype: torch.dtype) -> None:
    from PIL import Image

    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(data_dir / "weights" / "deit_tiny_patch16_224.fb_in1k.safetensors"))
    dtem.from_pretrained("deit_tiny_patch16_224", model, r=13)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    paths = sorted((data_dir / "imagenet" / "val").rglob("*.jpg"))[::250]
    photos = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    drift = precision.probe(model, photos, dtype)
    assert drift["merged_the_same"] > SAME[dtype]
    assert drift["not_near"] < 0.02
    assert drift["typical_difference"] < LOGITS[dtype] * drift["logit_range"]


def test_the_probe_sees_a_wrong_choice() -> None:
    """Another metric is no near tie: tokens differ, and the gap says so."""
    one, other = torch.randn(2, 33, 8), torch.randn(2, 33, 8)
    choices = [precision.Choice(z, 1, precision.ops.match(z, 8, 1)) for z in (one, other)]
    total, gaps = precision.compare(choices[0], choices[1])
    assert total == 16
    assert len(gaps) > 8
    assert max(gaps) > 0.1
    assert precision.compare(choices[0], choices[0]) == (16, [])
