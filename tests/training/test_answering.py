"""Training in vision-language models: what learns, and by which divergence."""

import copy

import pytest
import torch

import dtem
from tasks.captioning.small import CAPTIONS, write_pictures

pytest.importorskip("transformers")

from integrations.vlms import tiny_grid_vlm, write_vlm

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # of PaliGemma's processor
PLAIN = {"workers": 0, "batch_size": 4, "r": "9", "eval_r": "0,9", "max_new_tokens": 6, "updates": 3, "lr": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("answering")
    write_pictures(place)
    words = {word for captions in CAPTIONS for caption in captions for word in caption.split()}
    for kind in ("paligemma", "llava"):
        write_vlm(place / kind, kind, sorted(words | {"what", "is", "here", "user", "assistant", ":", "?"}))
    return place


@pytest.mark.parametrize(
    ("kind", "settings"), [("paligemma", {}), ("llava", {"captions_per_image": 2, "loss": "both"})]
)
def test_the_embeddings_learn_from_the_unmerged_model(folder, tmp_path, kind, settings):
    host = dtem.create_model(str(folder / kind))
    model = copy.deepcopy(host)
    data = f"{folder}/captions.json"
    values = PLAIN | {"loss": "distill", "question": "what is here ?"} | settings
    result = dtem.train(model, f"{data}#train", eval_data=f"{data}#val", out=str(tmp_path / "run"), **values)
    own = {name: part for name, part in model.state_dict().items() if not name.startswith("dtem.")}
    assert all(torch.equal(part, own[name]) for name, part in host.state_dict().items())
    untrained = dtem.patch(copy.deepcopy(host)).method.state_dict()
    learned = result.handle.method.state_dict()
    assert all(not torch.equal(part, learned[name]) for name, part in untrained.items())
    assert result.metrics["0"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert result.metrics["9"]["divergence"] > 1e-4
    again = dtem.from_pretrained(tmp_path / "run" / "adapter.safetensors", copy.deepcopy(host), r=9)
    assert all(torch.equal(part, learned[name]) for name, part in again.method.state_dict().items())


def test_the_text_follows_the_prompt_and_is_all_that_counts(folder):
    """Divergence and cross-entropy by hand: one image, one text, no padding."""
    from accelerate import Accelerator

    from dtem.data.loader import Batch
    from dtem.training.answering import Answering
    from dtem.training.config import TrainConfig

    model = dtem.create_model(str(folder / "llava"))
    settings = {"data": f"{folder}/captions.json#train", "question": "what is here ?", "max_new_tokens": 6}
    config = TrainConfig.from_dict(settings)
    task = Answering(config, model, Accelerator(cpu=True))
    batch = Batch(torch.randn(1, 3, 32, 32), torch.tensor([0]), ["0.png"])
    (inputs,), target = task.prepare(batch, 0)
    tokenizer = model.processor.tokenizer
    shown = tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
    assert shown.replace(" ", "").startswith("user:whatishere?assistant:")
    assert any(shown.replace(" ", "").endswith(caption.replace(" ", "")[-8:]) for caption in CAPTIONS[0])
    logits = task.logits(task.forward(model, inputs))
    assert logits.shape[1] == target.ids.shape[1]
    whole = model(**{name: value for name, value in inputs.items() if name != "logits_to_keep"}).logits
    text = target.ids[0, 1:]
    expected = torch.nn.functional.cross_entropy(whole[0, -len(text) - 1 : -1], text)
    torch.testing.assert_close(task.task_loss(logits, target), expected)


def test_what_cannot_be_trained_is_refused(folder, tmp_path):
    data = f"{folder}/captions.json#train"
    model, _ = tiny_grid_vlm("SmolVLM")
    with pytest.raises(dtem.DtemError, match="has no processor"):
        dtem.train(model, data, out=str(tmp_path), **PLAIN)
    host = dtem.create_model(str(folder / "llava"))
    with pytest.raises(dtem.DtemError, match="grad_checkpointing = True is not available"):
        dtem.train(host, data, out=str(tmp_path), grad_checkpointing=True, **PLAIN)
