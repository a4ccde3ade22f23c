"""A captioner of a few thousand weights in a folder, and a few random pictures with captions."""

import json

import torch
from PIL import Image

from benchmarks.reproduce.tokenizer import build
from integrations.gits import tiny_git

CAPTIONS = [
    ("a dog runs on the grass .", "a brown dog runs"),
    ("two men ride a red bike .", "men on a bike"),
    ("a girl in a red dress .", "a girl runs on the grass ."),
    ("a dog in the water .", "the brown dog swims in water ."),
    ("a man rides a bike .", "a man on a red bike ."),
    ("two girls in the water .", "girls swim ."),
]


def write_pictures(folder, splits=("train", "train", "train", "train", "val", "test")):
    """Pictures in folder/images and folder/captions.json, in the form of the shared Flickr8k."""
    (folder / "images").mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    listed = []
    for index, (captions, split) in enumerate(zip(CAPTIONS, splits, strict=True)):
        pixels = torch.randint(0, 256, (36, 44, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
        listed.append({"filename": f"{index}.png", "split": split, "captions": list(captions)})
    (folder / "captions.json").write_text(json.dumps(listed))
    return folder / "captions.json"


def write_captioner(folder):
    """A tiny GIT with a tokenizer, as transformers saves them."""
    tokenizer = build((caption for captions in CAPTIONS for caption in captions), least=1)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_git(vocab_size=len(tokenizer), **special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
