"""Training of captioners: what learns, by which loss, and which one is the best."""

import copy
import json
import shutil

import pytest
import timm
import torch

import dtem
from benchmarks.reproduce.captioner import captioner
from dtem.data.loader import Loader
from dtem.data.preprocessing import resolve_data_config
from dtem.data.transforms import eval_transform
from dtem.errors import DtemError
from dtem.models.git import load
from dtem.tasks.captioning.captions import open_captions
from dtem.tasks.captioning.loss import fisher_probes
from dtem.training import captioning
from dtem.training.config import TrainConfig
from tasks.captioning.small import write_captioner, write_pictures

PLAIN = {"workers": 0, "batch_size": 4, "r": "9", "eval_r": "9", "num_beams": 1, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("captioning")
    write_pictures(place)
    write_captioner(place / "model")
    return place


@pytest.fixture(scope="module")
def host(folder):
    return load(str(folder / "model"))


@pytest.fixture(autouse=True)
def _no_java(monkeypatch):
    """The metrics are tested elsewhere; Java takes seconds to start."""

    def scored(written, items):
        length = sum(map(len, written.captions.values()))
        written.scores = captioning.metric.Scores({"CIDEr": float(length), "BLEU-4": 1.0, "SPICE": "no"}, {}, [])
        return written

    monkeypatch.setattr(captioning.metric, "check", dict)
    monkeypatch.setattr(captioning, "with_scores", scored)


def trained(host, folder, out, **settings):
    model = copy.deepcopy(host)
    data = f"{folder}/captions.json"
    values = PLAIN | {"data": f"{data}#train", "eval_data": f"{data}#val", "updates": 3, "out": str(out)} | settings
    return model, dtem.train(model, values.pop("data"), **values)


def changed(model, host):
    own = {name: part for name, part in model.state_dict().items() if not name.startswith("dtem.")}
    return {name for name, part in host.state_dict().items() if not torch.equal(own[name], part)}


@pytest.mark.parametrize(("loss", "captions"), [("task", 1), ("both", 2)])
def test_modular_training_changes_the_embeddings_alone(host, folder, tmp_path, loss, captions):
    model, result = trained(host, folder, tmp_path / "run", loss=loss, captions_per_image=captions, lr=1e-2)
    assert changed(model, host) == set()
    untrained = dtem.patch(copy.deepcopy(host)).method.state_dict()
    learned = result.handle.method.state_dict()
    assert all(not torch.equal(part, learned[name]) for name, part in untrained.items())
    assert set(result.metrics["9"]) == {"CIDEr", "BLEU-4", "loss"}
    again = dtem.from_pretrained(tmp_path / "run" / "adapter.safetensors", copy.deepcopy(host), r=9)
    assert (
        json.loads(dtem.adapters.storage.read(tmp_path / "run" / "adapter.safetensors")[0]["notes"]["trained_on"])[0]
        == "0.png"
    )
    assert again.r == 9


def test_the_fisher_loss_trains_embeddings_alone(host, folder, tmp_path):
    fisher = {"loss": "distill", "options": {"fisher": True}, "captions_per_image": 2}
    model, result = trained(host, folder, tmp_path, **fisher, lr=1e-2, updates=12, eval_data="")
    assert changed(model, host) == set()
    untrained = dtem.patch(copy.deepcopy(host)).method.state_dict()
    learned = result.handle.method.state_dict()
    assert all(not torch.equal(part, learned[name]) for name, part in untrained.items() if name.endswith("weight"))


def test_fisher_probes_have_the_variance_of_a_word_on_average():
    """Twice the captions of an image, or padding behind them, does not change what its merges cost."""
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 5)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    probes = fisher_probes(logits, mask, 20000, images=2)
    words = logits[:, -4:-1][mask[:, 1:].bool()]
    p = words.softmax(-1)
    spread = (p * words.square()).sum(-1) - (p * words).sum(-1).square()  # the variance of a word's own probe
    assert probes.var().item() == pytest.approx(spread.sum().item() * 2 / len(words), rel=0.1)
    again = fisher_probes(logits.repeat(2, 1, 1), mask.repeat(2, 1), 20000, images=2)
    assert again.var().item() == pytest.approx(probes.var().item(), rel=0.1)


def test_the_loss_of_captions_goes_down(host, folder, tmp_path):
    """Over the same four images: what embeddings learn from words makes those words likelier."""
    outcomes = {}
    for lr in (1e-9, 3e-2):
        model, _ = trained(host, folder, tmp_path / str(lr), lr=lr, updates=12, captions_per_image=2, eval_data="")
        source = open_captions(f"{folder}/captions.json#train")
        loader = Loader(source, eval_transform(resolve_data_config(model)), 4)
        variants = {"9": captioning.evaluator.captioner(model, 1, 4)}
        outcomes[lr] = captioning.evaluator.run_variants(variants, loader, source.items)["9"].loss
    assert outcomes[3e-2] < outcomes[1e-9]


def test_end_to_end_training_alternates(host, folder, tmp_path):
    model, _ = trained(host, folder, tmp_path / "run", mode="end-to-end", embedding_every=2, host_r="5", host_lr=1e-3)
    assert {name.partition(".")[0] for name in changed(model, host)} == {"git", "output"}
    assert (tmp_path / "run" / "model.safetensors").is_file()
    untrained = dtem.patch(copy.deepcopy(host)).method.state_dict()
    assert any(not torch.equal(part, model.dtem.method.state_dict()[name]) for name, part in untrained.items())


def test_a_host_can_be_trained_without_merging(host, folder, tmp_path):
    model, result = trained(host, folder, tmp_path / "run", mode="finetune", method="tome", r="0", host_lr=1e-3)
    assert changed(model, host)
    assert result.handle.r == "0"


def test_the_best_is_that_of_the_highest_cider(host, folder, tmp_path, monkeypatch):
    values = iter([3.0, 7.0, 5.0])

    def scored(written, items):
        written.scores = captioning.metric.Scores({"CIDEr": next(values), "BLEU-4": 1.0}, {}, [])
        return written

    monkeypatch.setattr(captioning, "with_scores", scored)
    trained(host, folder, tmp_path / "run", eval_every=1, lr=1e-2)
    best = dtem.adapters.storage.read(tmp_path / "run" / "best.safetensors")[0]
    assert best["notes"]["updates"] == "2"


def test_captions_are_drawn_by_the_seed_and_not_twice(folder):
    task = captioning.Captioning.__new__(captioning.Captioning)
    task.config, task.source = (
        TrainConfig.from_dict(PLAIN | {"captions_per_image": 2}),
        open_captions(f"{folder}/captions.json#train"),
    )
    batch = captioning.Batch(torch.zeros(4, 3, 32, 32), torch.arange(4), task.source.names)
    drawn = task.draw_texts(batch, 5)
    assert drawn == task.draw_texts(batch, 5)
    for index, item in enumerate(task.source.items):
        assert {drawn[index], drawn[index + 4]} == set(item.captions)
    assert len({tuple(task.draw_texts(batch, seed)) for seed in range(8)}) > 1


def test_what_cannot_learn_of_a_captioner_on_a_plain_vit_stays(folder, tmp_path):
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2)
    tokenizer = load(str(folder / "model")).tokenizer
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    text = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    captioner(vit, len(tokenizer), special, **text).save_pretrained(tmp_path / "git")
    tokenizer.save_pretrained(tmp_path / "git")
    shutil.copy(folder / "model" / "preprocessor_config.json", tmp_path / "git")
    host = load(str(tmp_path / "git"))
    model, _ = trained(host, folder, tmp_path / "run", mode="finetune", method="tome", r="3", eval_r="3", host_lr=1e-2)
    moved = {name.removeprefix("git.image_encoder.vision_model.").partition(".")[0] for name in changed(model, host)}
    assert {"encoder", "post_layernorm"} <= moved
    assert not moved & {"embeddings", "pre_layrnorm"}


def test_checkpointing_is_refused(host, folder, tmp_path):
    with pytest.raises(DtemError, match="grad_checkpointing = True is not available for captioning"):
        trained(host, folder, tmp_path, grad_checkpointing=True)


def test_what_is_missing_is_said_early(host, folder, tmp_path):
    with pytest.raises(DtemError, match=r"no training data.*captions.json"):
        trained(host, folder, tmp_path / "a", data="")
    bare = copy.deepcopy(host)
    del bare.tokenizer
    with pytest.raises(DtemError, match="no tokenizer"):
        trained(bare, folder, tmp_path / "b")
