"""The ablation without proportional attention is DTEM with that switch off, everywhere."""

import pytest
import torch

from contract.hosts import images, patched


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mode", ["hard", "soft"])
@pytest.mark.parametrize("name", ["deit", "mae", "siglip"])
def test_it_is_dtem_with_the_switch_off(name, mode, batch):
    outputs = []
    for method, options in (("dtem_no_prop", {}), ("dtem", {"proportional": False}), ("dtem", {})):
        model, handle = patched(name, method, **options)
        handle.mode = mode
        with torch.no_grad():
            outputs.append(model(images(name, batch)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3), "the switch must matter"


@pytest.mark.parametrize("name", ["deit", "mae"])
def test_it_is_off_in_training_and_at_inference(name):
    _, handle = patched(name, "dtem_no_prop")
    for mode in ("soft", "hard"):
        handle.mode = mode
        assert not handle.method.proportional
    assert handle.method.name == "dtem_no_prop"
    assert list(handle.method.state_dict()) == list(patched(name, "dtem")[1].method.state_dict())
