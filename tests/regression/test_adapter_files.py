"""Adapter files of earlier versions load, and give the logits that they gave then.

Each case is two files, both written by dtem 0.3 (file format 1):

    NAME.adapter.safetensors   the adapter, as `save_pretrained` wrote it: dtem with every trained weight perturbed
    NAME.safetensors           the host's weights (host.*), two random images, and the logits at three rates (logits.R)

The hosts are the tiny ones of the contract suite. Files are only ever added: one pair for each new file format.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dtem
from contract.hosts import HOSTS

FOLDER = Path(__file__).parent
CASES = {"classifier_format1": ("distilled", "9"), "segmenter_format1": ("segmenter", "40%")}
"""File, its host, and the rate that is stored in it."""


def host_of(name):
    """The host with its stored weights, and all stored tensors."""
    reference = load_file(FOLDER / f"{name}.safetensors")
    model = HOSTS[CASES[name][0]].build().eval()
    model.load_state_dict({key.removeprefix("host."): part for key, part in reference.items() if "host." in key})
    return model, reference


@pytest.mark.parametrize("name", CASES)
def test_an_old_adapter_gives_its_old_logits(name):
    model, reference = host_of(name)
    handle = dtem.from_pretrained(FOLDER / f"{name}.adapter.safetensors", model)
    assert str(handle.r) == CASES[name][1]
    rates = [key.removeprefix("logits.") for key in reference if key.startswith("logits.")]
    assert len(rates) == 3
    for r in rates:
        with torch.no_grad(), handle.at(r=r):
            torch.testing.assert_close(model(reference["images"]), reference[f"logits.{r}"], rtol=0, atol=1e-6)


def test_every_stored_adapter_is_tested():
    assert {path.name.split(".")[0] for path in FOLDER.glob("*.safetensors")} == set(CASES)


@pytest.mark.parametrize("feature", ["learned rates", "dtem_no_prop"])
def test_files_of_features_that_are_gone_load_too(feature, tmp_path):
    """Such files differ from the stored one in their header, and in tensors that are no longer used."""
    path, adapter = tmp_path / "old.safetensors", FOLDER / "classifier_format1.adapter.safetensors"
    tensors, (model, reference) = load_file(adapter), host_of("classifier_format1")
    with safe_open(adapter, framework="pt") as file:
        header = json.loads(file.metadata()["dtem"])
    assert header["options"]["learn_rates"] is False
    if feature == "learned rates":
        header["options"]["learn_rates"], header["schedule"] = True, "9/9/9/9"
        tensors |= {"rates.offset": torch.zeros(4), "rates.start": torch.zeros(4), "rates.prices": torch.zeros(6)}
    else:
        header["method"], header["options"]["proportional"] = feature, False
    save_file(tensors, path, {"dtem": json.dumps(header)})
    handle = dtem.from_pretrained(path, model)
    assert (handle.method.name, handle.plan) == ("dtem", (9, 9, 9, 9))
    with torch.no_grad():
        logits = model(reference["images"])
    assert handle.method.proportional == (feature == "learned rates")
    assert torch.allclose(logits, reference["logits.9"], rtol=0, atol=1e-6) == handle.method.proportional
