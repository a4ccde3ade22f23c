"""A small captioner to prove things on: GIT with the encoder of a real DeiT-T, its decoder trained on Flickr8k.

python benchmarks/captioning_host.py --data DIR --out FOLDER

DIR holds flickr8k (captions.json, images) and weights. The encoder is frozen, so its features are computed once; the
decoder reads all five captions of an image in one sequence, each under a mask of
its own. The folder has the model, its tokenizer and how it wants its images: what `dtem eval --task captioning` takes.
A run goes on where it was stopped.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dtem.hosts.captioner import captioner
from dtem.tasks.captioning import words
from dtem.tasks.captioning.data import Captions, open_captions
from dtem.tasks.classification.data import Loader, eval_transform

DECODER = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.1,
}
LONGEST = 32
"""Tokens of a caption, with its first and last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    add_arguments(parser)
    common.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    build(args.data, args.out or Path("runs/captioner"), args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host-epochs", type=int, default=8)
    parser.add_argument("--host-batch", type=int, default=16)
    parser.add_argument("--host-lr", type=float, default=1e-3)
    parser.add_argument("--host-decay", type=float, default=0.05)


def build(data: Path, folder: Path, args: argparse.Namespace) -> Path:
    """Train the captioner into `folder`, unless it is there already."""
    if (folder / "trained.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = {split: open_captions(f"{data}/flickr8k/captions.json#{split}") for split in ("train", "val")}
    vit = timm.create_model("deit_tiny_patch16_224").eval()
    vit.load_state_dict(load_file(data / "weights" / "deit_tiny_patch16_224.fb_in1k.safetensors"))
    tokenizer = words.build(caption for item in source["train"].items for caption in item.captions)
    torch.manual_seed(0)
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    model = captioner(vit, len(tokenizer), special, **DECODER)
    features = {split: cached(folder, split, model, found) for split, found in source.items()}
    packed = {split: [pack(tokenizer, item.captions) for item in found.items] for split, found in source.items()}
    best = learn(model, features, packed, folder, args)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = vit.pretrained_cfg
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "CLIPImageProcessor",
                "image_mean": list(config["mean"]),
                "image_std": list(config["std"]),
                "size": {"height": 224, "width": 224},
                "crop_size": {"height": 224, "width": 224},
                "do_resize": True,
                "do_center_crop": False,
                "resample": 3,
            },
            indent=2,
        )
    )
    (folder / "trained.json").write_text(
        json.dumps(best | {"epochs": args.host_epochs, "batch": args.host_batch, "lr": args.host_lr})
    )
    return folder


@torch.inference_mode()
def cached(folder: Path, split: str, model: Any, source: Captions) -> Tensor:
    """What the encoder says of every image: (images, tokens, width)."""
    found, files = [], []
    loader = Loader(source, eval_transform(squashed()), 250)
    assert loader.steps is not None
    for step in range(loader.steps):
        files.append(folder / f"features-{split}-{step}.safetensors")
        if not files[-1].exists():
            images = next(loader.epoch(0, step)).images
            parts = [model.git.image_encoder.eval()(part).last_hidden_state.half() for part in images.split(25)]
            save_file({"features": torch.cat(parts)}, files[-1])
            print(f"{split}: {step + 1} of {loader.steps} parts encoded", flush=True)
        found.append(load_file(files[-1])["features"])
    if loader.skipped:
        raise SystemExit(f"images that cannot be read: {loader.skipped}")
    return torch.cat(found)


def squashed() -> dict[str, Any]:
    """How images are brought to 224×224: resized, nothing else."""
    config = timm.data.resolve_data_config(model=timm.create_model("deit_tiny_patch16_224"))
    return config | {"crop_pct": 1.0, "crop_mode": "squash"}


def pack(tokenizer: Any, captions: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """All captions of an image one after the other: ids, positions, and which caption each token belongs to."""
    ids = [tokenizer(caption, truncation=True, max_length=LONGEST).input_ids for caption in captions]
    flat = torch.tensor([token for caption in ids for token in caption])
    place = torch.cat([torch.arange(len(caption)) for caption in ids])
    owner = torch.cat([torch.full((len(caption),), index) for index, caption in enumerate(ids)])
    return flat, place, owner


def collate(packs: list[tuple[Tensor, Tensor, Tensor]], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(len(ids) for ids, _, _ in packs)
    fill = (pad, 0, -1)
    columns = [
        torch.stack([F.pad(part, (0, longest - len(part)), value=value) for part in parts])
        for parts, value in zip(zip(*packs, strict=True), fill, strict=True)
    ]
    return columns[0], columns[1], columns[2]


def loss_of(model: Any, seen: Tensor, ids: Tensor, place: Tensor, owner: Tensor) -> Tensor:
    """Cross-entropy per word of all captions, as the host computes it for one."""
    git = model.git
    image = git.visual_projection(seen)
    hidden = torch.cat([image, git.embeddings(ids, position_ids=place)], dim=1)
    count = image.shape[1]
    text = torch.arange(ids.shape[1])
    same = (owner[:, :, None] == owner[:, None, :]) & (text[:, None] >= text[None, :])
    allowed = torch.zeros(len(ids), hidden.shape[1], hidden.shape[1], dtype=torch.bool)
    allowed[:, :, :count] = True
    allowed[:, count:, count:] = same
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min).unsqueeze(1)
    out = git.encoder(hidden, attention_mask=mask).last_hidden_state[:, count:-1]
    follows = (owner[:, 1:] == owner[:, :-1]) & (owner[:, 1:] >= 0)
    return F.cross_entropy(model.output(out[follows]).float(), ids[:, 1:][follows])


def learn(model: Any, features: dict[str, Tensor], packed: dict[str, list], folder: Path, args: Any) -> dict[str, Any]:
    """Train the decoder; the best epoch by validation loss stays in the model."""
    pad = model.config.pad_token_id
    state = model.state_dict()
    learns = {name: p for name, p in model.named_parameters() if "image_encoder" not in name}
    decayed = [p for p in learns.values() if p.ndim > 1]
    plain = [p for p in learns.values() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.host_decay}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.host_lr, betas=(0.9, 0.98))
    steps = len(packed["train"]) // args.host_batch
    total, best, start = steps * args.host_epochs, {"loss": math.inf}, 0
    if (folder / "last.pt").exists():
        last = torch.load(folder / "last.pt", weights_only=True)
        model.load_state_dict(last["model"], strict=False)
        optimiser.load_state_dict(last["optimiser"])
        best, start = last["best"], last["epoch"] + 1
    for epoch in range(start, args.host_epochs):
        began, losses = time.perf_counter(), []
        order = np.random.default_rng([0, epoch]).permutation(len(packed["train"]))
        model.train()
        torch.manual_seed(epoch)
        for step in range(steps):
            rows = order[step * args.host_batch : (step + 1) * args.host_batch]
            done = (epoch * steps + step) / total
            lr = (
                args.host_lr
                * min(1.0, (epoch * steps + step + 1) / 200)
                * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            )
            for group in optimiser.param_groups:
                group["lr"] = lr
            seen = features["train"][torch.from_numpy(rows)].float()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, seen, *collate([packed["train"][row] for row in rows], pad))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(learns.values()), 1.0)
            optimiser.step()
            losses.append(loss.item())
            if step % 20 == 0:
                spent = time.perf_counter() - began
                print(f"epoch {epoch} step {step}/{steps} loss {np.mean(losses[-20:]):.3f} {spent:.0f} s", flush=True)
        found = validate(model, features["val"], packed["val"], pad)
        print(
            f"epoch {epoch}: train {np.mean(losses):.4f} val {found:.4f} {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        if found < best["loss"]:
            best = {"loss": found, "epoch": epoch}
            save_file({name: p.detach().clone() for name, p in learns.items()}, folder / "best.safetensors")
        kept = {"model": {n: p.detach() for n, p in learns.items()}, "optimiser": optimiser.state_dict()}
        torch.save(kept | {"best": best, "epoch": epoch}, folder / "last.pt")
    state.update(load_file(folder / "best.safetensors"))
    model.load_state_dict(state)
    return best


@torch.inference_mode()
def validate(model: Any, features: Tensor, packed: list, pad: int) -> float:
    model.eval()
    found, words_ = 0.0, 0
    for start in range(0, len(packed), 25):
        part = collate(packed[start : start + 25], pad)
        count = int(((part[2][:, 1:] == part[2][:, :-1]) & (part[2][:, 1:] >= 0)).sum())
        found += loss_of(model, features[start : start + 25].float(), *part).item() * count
        words_ += count
    return found / words_


if __name__ == "__main__":
    main()
