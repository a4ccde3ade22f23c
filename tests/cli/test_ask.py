"""`dtem ask` and `dtem.ask`, on vision-language models of a few thousand weights."""

import json

import pytest
import torch
from PIL import Image

import dtem
from dtem.cli import main

pytest.importorskip("transformers")

from integrations.vlms import tiny_grid_vlm, write_vlm

WORDS = ("what", "is", "the", "dog", "doing", "user", "assistant", ":", "?", "running", "on", "grass", "a", "cat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("vlm")
    for kind in ("paligemma", "llava"):
        write_vlm(place / kind, kind, WORDS)
    for name in ("a", "b"):
        pixels = torch.randint(0, 256, (40, 50, 3), generator=torch.Generator().manual_seed(ord(name)))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{name}.png")
    return place


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in PaliGemma's processor
@pytest.mark.parametrize("kind", ["paligemma", "llava"])
def test_the_verb_asks_every_image_at_every_r(folder, capsys, kind):
    images = [str(folder / "a.png"), str(folder / "b.png")]
    command = ["ask", *images, "what is the dog doing ?", "--model", str(folder / kind), "--r", "0,6"]
    assert main([*command, "--max-new-tokens", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["question"] == "what is the dog doing ?"
    rows = document["rows"]
    assert [(row["image"], row["r"]) for row in rows] == [(image, r) for image in images for r in ("0", "6")]
    assert [row["tokens"] for row in rows] == [64, 40] * 2
    model = dtem.create_model(str(folder / kind))
    unmerged = model.generate(**inputs(model, images[0], kind), max_new_tokens=5, do_sample=False)[0, -5:]
    assert rows[0]["answer"] == model.processor.decode(unmerged, skip_special_tokens=True).strip()
    assert main(command) == 0
    assert "what is the dog doing ?" in capsys.readouterr().out
    once = main([*command, "--max-new-tokens", "5", "--num-beams", "2", "--no-proportional-decoder", "--json"])
    assert once == 0


def inputs(model, image, kind):
    """The inputs of a question, made by hand."""
    text = "<image>what is the dog doing ?"
    text = text if kind == "paligemma" else f"USER: {text} ASSISTANT:"
    out = model.processor(images=[Image.open(image)], text=[text], return_tensors="pt")
    return {name: value for name, value in out.items() if name != "labels"}


def test_a_cut_grid_is_asked_too():
    """The processor is the caller's; the language model reads as many tokens as before."""
    model, prompt = tiny_grid_vlm("SmolVLM")
    handle = dtem.patch(model, r="40%")

    class Inputs(dict):
        def to(self, _):
            return self

    class Processor:
        image_token = "<image>"

        def __call__(self, images, text, return_tensors):
            assert text == ["<image>what ?"]
            return Inputs({name: value[:1] for name, value in prompt.items()})

        def decode(self, ids, skip_special_tokens):
            return " ".join(map(str, ids.tolist()))

    image = torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()
    report = dtem.ask(handle, [image], "what ?", r=(0, "40%"), processor=Processor(), max_new_tokens=3)
    assert [(row.image, row.r, row.tokens) for row in report.rows] == [("image 0", "0", 48), ("image 0", "40%", 48)]
    assert all(len(row.answer.split()) == 3 for row in report.rows)
    assert handle.r == "40%"


def test_what_cannot_be_asked_is_refused(folder, capsys, tmp_path):
    image = str(folder / "a.png")
    command = ["ask", image, "what ?", "--model"]
    assert main([*command, "digits_vit", "--r", "2"]) == 2
    assert "answers no questions" in capsys.readouterr().err
    assert main(["ask", str(tmp_path / "none.png"), "what ?", "--model", str(folder / "llava")]) == 2
    assert "there is no image file" in capsys.readouterr().err
    for file in (folder / "llava").iterdir():
        if file.name in ("config.json", "model.safetensors", "generation_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main([*command, str(tmp_path)]) == 2
    assert "has no processor" in capsys.readouterr().err
    assert main(["caption", image, "--model", str(folder / "llava")]) == 2
    assert "dtem.ask asks vision-language models" in capsys.readouterr().err
