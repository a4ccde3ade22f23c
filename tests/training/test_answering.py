"""Training in vision-language models: what learns, and by which divergence."""

import copy
import json

import pytest
import torch

import dtem
from dtem.cli import main
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


def command(folder, kind, out, *more):
    """`dtem train` on photographs alone."""
    settings = ["--loss", "distill", "--question", "what is here ?", "--max-new-tokens", "4", "--r", "9"]
    settings += ["--eval-r", "0,9", "--batch-size", "3", "--updates", "4", "--lr", "1e-2", "--workers", "0"]
    place = ["--data", str(folder / "images"), "--eval-data", str(folder / "images"), "--out", str(out)]
    return ["train", "--model", str(folder / kind), *place, *settings, *more]


@pytest.mark.parametrize("kind", ["paligemma", "llava"])
def test_the_verb_learns_from_photographs_alone_and_resumes(folder, tmp_path, capsys, monkeypatch, kind):
    """The texts are the unmerged model's answers. An interrupted run ends as one that was not."""
    from dtem.training.answering import Answering

    assert main([*command(folder, kind, tmp_path / "whole"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    unmerged, merged = report["evaluation"]
    assert unmerged["divergence"] == pytest.approx(0, abs=1e-6)
    assert merged["divergence"] > 1e-4
    prepare, calls = Answering.prepare, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return prepare(self, *arguments)

    monkeypatch.setattr(Answering, "prepare", interrupted)
    parts = command(folder, kind, tmp_path / "parts", "--save-every", "1")
    assert main(parts) != 0
    assert "resumes" in capsys.readouterr().err
    assert main(parts) == 0
    assert len(calls) == 5, "two updates, the interrupted one, and the two that were left"
    adapters = [dtem.create_model(str(folder / kind)) for _ in range(2)]
    states = [
        dtem.from_pretrained(tmp_path / run / "adapter.safetensors", model).method.state_dict()
        for run, model in zip(("whole", "parts"), adapters, strict=True)
    ]
    assert all(torch.equal(part, states[1][name]) for name, part in states[0].items())


def test_answers_are_those_of_the_unmerged_model(folder):
    from accelerate import Accelerator

    from dtem.data.loader import Batch
    from dtem.training.answering import Answering
    from dtem.training.config import TrainConfig

    host = dtem.create_model(str(folder / "llava"))
    model = copy.deepcopy(host)
    handle = dtem.patch(model, r=9)
    handle.mode = "soft"
    settings = {"data": str(folder / "images"), "question": "what is here ?", "max_new_tokens": 4, "loss": "distill"}
    task = Answering(TrainConfig.from_dict(settings), model, Accelerator(cpu=True))
    images = torch.randn(2, 3, 32, 32)
    answers = task._answers(Batch(images, torch.tensor([-1, -1]), ["a", "b"]))
    prompt = {name: part.expand(2, -1) for name, part in task.prompt.items()}
    ids = host.generate(**prompt, pixel_values=images, max_new_tokens=4, do_sample=False)
    expected = task.tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answers == expected
    assert handle.r == 9
    assert handle.mode == "soft"


def test_photographs_alone_have_no_texts_to_learn(folder, tmp_path, capsys):
    assert main(command(folder, "llava", tmp_path, "--loss", "both")) == 2
    assert "holds images alone: set --loss distill" in capsys.readouterr().err
