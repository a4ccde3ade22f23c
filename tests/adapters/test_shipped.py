"""Adapters that come with the package: they load, their cards and lists belong to them, and they do what they claim."""

import json
from pathlib import Path

import pytest
import timm
import torch

import dtem
from dtem.adapters import storage

FOLDER = Path(dtem.__file__).parent / "adapters" / "shipped"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def test_there_is_one_at_least() -> None:
    assert "deit_tiny_patch16_224" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_adapter_loads_without_network_and_is_trained(name: str) -> None:
    handle = dtem.from_pretrained(name, timm.create_model(name), r=16)
    untrained = dtem.patch(timm.create_model(name), norms=True)
    trained = handle.method.state_dict()
    changed = {
        key.split(".")[0] for key, part in untrained.method.state_dict().items() if not torch.equal(part, trained[key])
    }
    assert changed == {"affine", "embeddings"}
    assert handle.tokens[-1] == 11


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_has_a_card_and_the_list_of_its_files(name: str) -> None:
    assert (FOLDER / f"{name}.safetensors").stat().st_size < 1_000_000
    card = (FOLDER / f"{name}.md").read_text()
    header, _ = storage.read(FOLDER / f"{name}.safetensors")
    listed = json.loads(header["notes"]["trained_on"])
    assert listed == (FOLDER / f"{name}.files.txt").read_text().split()
    assert "validation" in card
    assert f"{len(listed):,} photographs" in card


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_nearer_to_the_truth_than_tome_on_photographs_it_never_saw(name: str, data_dir: Path) -> None:
    from safetensors.torch import load_file

    from dtem.data import loader, sources, transforms
    from dtem.tasks.classification import evaluator, outcomes

    model = timm.create_model(name)
    (weights,) = (data_dir / "weights").glob(f"{name}.*")
    model.load_state_dict(load_file(weights))
    source = sources.open_source(str(data_dir / "imagenet" / "val"))
    header, _ = storage.read(FOLDER / f"{name}.safetensors")
    source, left_out = sources.without(source, storage.trained_on(header))
    assert left_out == 0
    batches = loader.Loader(source, transforms.eval_transform(timm.data.resolve_data_config(model=model)), 50)
    tome = dtem.patch(model, "tome")
    theirs = evaluator.sweep(tome, batches, ["16"])["16"]
    tome.unpatch()
    both = outcomes.paired(theirs, evaluator.sweep(dtem.from_pretrained(name, model), batches, ["16"])["16"])
    assert both.loss.high < 0  # cross-entropy is lower, beyond chance
    assert both.top1.value > 0  # 1,000 photographs cannot say more
