"""Adapter files of earlier versions load, and give the logits that they gave then.

Each case is two files, written by one version of dtem; `archive.py` writes them:

    NAME.adapter.safetensors   the adapter, as `save_pretrained` wrote it: dtem with every trained weight perturbed; or
    NAME.adapter/              the same as a folder
    NAME.safetensors           the host's weights (host.*), two random images, and the logits at three rates (logits.R)
    NAME.onnx                  (some) the model with the adapter, exported at the stored rate

format1 is of dtem 0.3, format2 of 0.4 (with norms and biases), folder of 0.5. The hosts are the tiny ones of the
contract suite. Files are only ever added.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dtem
from contract.hosts import HOSTS
from dtem.adapters.header import FORMAT

FOLDER = Path(__file__).parent
CASES = {
    "classifier_format1": ("distilled", "9"),
    "segmenter_format1": ("segmenter", "40%"),
    "classifier_format2": ("distilled", "9"),
    "classifier_folder": ("distilled", "9"),
}
"""Name, its host, and the rate that is stored in the adapter."""
ENDINGS = (".safetensors", ".onnx")
EXPORTED = ["classifier_format2"]
SHA256 = {
    "classifier_folder.adapter/adapter.safetensors": "7dae7ac9020a5ba3",
    "classifier_folder.safetensors": "905937d17ef82123",
    "classifier_format1.adapter.safetensors": "2fcd2f40cd77d753",
    "classifier_format1.safetensors": "1357ce7b2c58f655",
    "classifier_format2.adapter.safetensors": "70673e89e6101b1e",
    "classifier_format2.onnx": "9aadde8e328a9af1",
    "classifier_format2.safetensors": "905937d17ef82123",
    "segmenter_format1.adapter.safetensors": "2a67ef9f3fdc6ac2",
    "segmenter_format1.safetensors": "9f82b60835f5c1b0",
}
"""First 16 digits, of every archived binary file: none may go or be written again. New files get a line here."""


def adapter_of(name):
    """The adapter's file, or its folder."""
    folder = FOLDER / f"{name}.adapter"
    return folder if folder.is_dir() else FOLDER / f"{name}.adapter.safetensors"


def host_of(name):
    """The host with its stored weights, and all stored tensors."""
    reference = load_file(FOLDER / f"{name}.safetensors")
    model = HOSTS[CASES[name][0]].build().eval()
    model.load_state_dict({key.removeprefix("host."): part for key, part in reference.items() if "host." in key})
    return model, reference


@pytest.mark.parametrize("name", CASES)
def test_an_old_adapter_gives_its_old_logits(name):
    model, reference = host_of(name)
    handle = dtem.from_pretrained(adapter_of(name), model)
    assert str(handle.r) == CASES[name][1]
    rates = [key.removeprefix("logits.") for key in reference if key.startswith("logits.")]
    assert len(rates) == 3
    for r in rates:
        with torch.no_grad(), handle.at(r=r):
            torch.testing.assert_close(model(reference["images"]), reference[f"logits.{r}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_old_exported_file_gives_its_old_logits(name):
    """In onnxruntime, alone: a file runs without dtem, so that only its runtime can change it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    reference = load_file(FOLDER / f"{name}.safetensors")
    session = onnxruntime.InferenceSession(FOLDER / f"{name}.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": reference["images"].numpy()})
    expected = reference[f"logits.{CASES[name][1]}"]
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-4)


def test_every_stored_adapter_is_tested():
    assert {path.name.split(".")[0] for path in FOLDER.glob("*.*") if path.suffix != ".py"} == set(CASES)
    assert {path.stem for path in FOLDER.glob("*.onnx")} == set(EXPORTED)


def test_no_archived_file_is_missing_or_changed():
    stored = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.suffix in ENDINGS}
    assert stored.keys() == SHA256.keys()
    for name, path in stored.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(SHA256[name]), f"{name} was changed"


def test_every_format_is_archived_with_logits():
    """A new format needs a case here before it is released: `archive.py` writes it."""
    formats = set()
    for name in CASES:
        adapter = adapter_of(name)
        with safe_open(adapter / "adapter.safetensors" if adapter.is_dir() else adapter, framework="pt") as file:
            formats.add(json.loads(file.metadata()["dtem"])["format"])
        assert any(key.startswith("logits.") for key in load_file(FOLDER / f"{name}.safetensors"))
    assert formats == set(range(1, FORMAT + 1))


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
