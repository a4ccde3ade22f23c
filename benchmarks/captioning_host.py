"""A small captioner to prove things on: GIT with the encoder of a real DeiT-T, trained on Flickr8k.

python -m benchmarks.captioning_host --data DIR --out FOLDER
python -m benchmarks.captioning_host --data DIR --out FOLDER --tune-epochs 0        the encoder stays DeiT-T's

DIR holds flickr8k (captions.json, images) and weights. The decoder learns while the encoder is frozen, so that its
features are computed once; then both learn. The decoder reads all five captions of an image in one
sequence, each under a mask of its own. The folder has the model, its tokenizer and how it wants its images: what `dtem
eval --task captioning` takes. A run goes on where it was stopped.
"""

import argparse
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from benchmarks import common
from benchmarks.reproduce.captioner import FIXED, captioner
from benchmarks.reproduce.tokenizer import build as build_tokenizer
from dtem.data.loader import Loader
from dtem.data.transforms import eval_transform
from dtem.files import write_file
from dtem.tasks.captioning.captions import Captions, open_captions

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
ENCODER = "git.image_encoder"


@dataclass(frozen=True)
class Stage:
    """A part of the training."""

    name: str
    """Of its files."""
    epochs: int
    lr: dict[str, float]
    """Of the parameters, by what their names start with."""
    see: Callable[[str, Tensor], Tensor]
    """What the decoder gets of these images (rows) of a split."""


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
    parser.add_argument("--tune-epochs", type=int, default=4, help="in which the encoder learns too")
    parser.add_argument("--tune-lr", type=float, default=2e-4)
    parser.add_argument("--encoder-lr", type=float, default=5e-5)


def build(data: Path, folder: Path, args: argparse.Namespace) -> Path:
    """Train the captioner into `folder`, unless it is there already."""
    if (folder / "trained.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = {split: open_captions(f"{data}/flickr8k/captions.json#{split}") for split in ("train", "val")}
    vit = timm.create_model("deit_tiny_patch16_224").eval()
    vit.load_state_dict(load_file(data / "weights" / "deit_tiny_patch16_224.fb_in1k.safetensors"))
    tokenizer = build_tokenizer(caption for item in source["train"].items for caption in item.captions)
    torch.manual_seed(0)
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    model = captioner(vit, len(tokenizer), special, **DECODER)
    packed = {split: [pack(tokenizer, item.captions) for item in captions.items] for split, captions in source.items()}
    features = {split: cached(folder, split, model, captions) for split, captions in source.items()}
    decoder = [name for name, _ in model.named_parameters() if not name.startswith(ENCODER)]
    frozen = Stage(
        "", args.host_epochs, dict.fromkeys(decoder, args.host_lr), lambda split, rows: features[split][rows].float()
    )
    best = learn(model, frozen, packed, folder, args)
    if args.tune_epochs:
        best = learn(model, tuning(model, decoder, source, args), packed, folder, args)
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
        json.dumps(
            best
            | {"epochs": args.host_epochs, "batch": args.host_batch, "lr": args.host_lr}
            | {"tune_epochs": args.tune_epochs, "tune_lr": args.tune_lr, "encoder_lr": args.encoder_lr}
        )
    )
    return folder


def tuning(model: Any, decoder: list[str], source: dict[str, Captions], args: argparse.Namespace) -> Stage:
    """Both learn, from images that are flipped at random."""
    images = {split: pixels(captions) for split, captions in source.items()}
    blocks = [
        name
        for name, _ in model.named_parameters()
        if name.startswith(ENCODER) and not any(part in name for part in FIXED)
    ]

    def see(split: str, rows: Tensor) -> Tensor:
        shown = images[split][rows].float()
        if model.training:
            shown = torch.where((torch.rand(len(rows)) < 0.5)[:, None, None, None], shown.flip(-1), shown)
        seen: Tensor = model.git.image_encoder(shown).last_hidden_state
        return seen

    rates = dict.fromkeys(decoder, args.tune_lr) | dict.fromkeys(blocks, args.encoder_lr)
    return Stage("tuned-", args.tune_epochs, rates, see)


def pixels(source: Captions) -> Tensor:
    """All images, in half precision."""
    return torch.cat([batch.images.half() for batch in Loader(source, eval_transform(squashed()), 250).epoch(0)])


@torch.inference_mode()
def cached(folder: Path, split: str, model: Any, source: Captions) -> Tensor:
    """What the encoder says of every image: (images, tokens, width)."""
    features, files = [], []
    loader = Loader(source, eval_transform(squashed()), 250)
    assert loader.steps is not None
    for step in range(loader.steps):
        files.append(folder / f"features-{split}-{step}.safetensors")
        if not files[-1].exists():
            images = next(loader.epoch(0, step)).images
            parts = [model.git.image_encoder.eval()(part).last_hidden_state.half() for part in images.split(25)]
            write_file(files[-1], to_bytes({"features": torch.cat(parts)}))
            print(f"{split}: {step + 1} of {loader.steps} parts encoded", flush=True)
        features.append(load_file(files[-1])["features"])
    if loader.skipped:
        raise SystemExit(f"images that cannot be read: {loader.skipped}")
    return torch.cat(features)


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


def learn(model: Any, stage: Stage, packed: dict[str, list], folder: Path, args: Any) -> dict[str, Any]:
    """Train through one stage; the best epoch by validation loss stays in the model."""
    pad = model.config.pad_token_id
    learns = {name: p for name, p in model.named_parameters() if name in stage.lr}
    groups = [
        {"params": [p], "lr": stage.lr[name], "weight_decay": args.host_decay if p.ndim > 1 else 0.0}
        for name, p in learns.items()
    ]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    steps = len(packed["train"]) // args.host_batch
    total = steps * stage.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / total))),
    )
    best, start = {"loss": math.inf}, 0
    last, best_file = folder / f"{stage.name}last.pt", folder / f"{stage.name}best.safetensors"
    if last.exists():
        state = torch.load(last, weights_only=True)
        model.load_state_dict(state["model"], strict=False)
        optimiser.load_state_dict(state["optimiser"])
        scheduler.load_state_dict(state["scheduler"])
        best, start = state["best"], state["epoch"] + 1
    for epoch in range(start, stage.epochs):
        began, losses = time.perf_counter(), []
        order = torch.from_numpy(np.random.default_rng([0, epoch]).permutation(len(packed["train"])))
        model.train()
        torch.manual_seed(epoch)
        for step in range(steps):
            rows = order[step * args.host_batch : (step + 1) * args.host_batch]
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, stage.see("train", rows), *collate([packed["train"][row] for row in rows], pad))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(learns.values()), 1.0)
            optimiser.step()
            scheduler.step()
            losses.append(loss.item())
            if step % 20 == 0:
                spent = time.perf_counter() - began
                print(f"epoch {epoch} step {step}/{steps} loss {np.mean(losses[-20:]):.3f} {spent:.0f} s", flush=True)
        loss = validate(model, stage, packed["val"], pad)
        spent = time.perf_counter() - began
        print(f"epoch {epoch}: train {np.mean(losses):.4f} val {loss:.4f} {spent:.0f} s", flush=True)
        if loss < best["loss"]:
            best = {"loss": loss, "epoch": epoch}
            write_file(best_file, to_bytes({name: p.detach().clone() for name, p in learns.items()}))
        states: dict[str, Any] = {"optimiser": optimiser.state_dict(), "scheduler": scheduler.state_dict()}
        states |= {"model": {n: p.detach() for n, p in learns.items()}, "best": best, "epoch": epoch}
        buffer = io.BytesIO()
        torch.save(states, buffer)
        write_file(last, buffer.getvalue())
    model.load_state_dict(load_file(best_file), strict=False)
    return best


@torch.inference_mode()
def validate(model: Any, stage: Stage, packed: list, pad: int) -> float:
    model.eval()
    loss, num_words = 0.0, 0
    for rows in torch.arange(len(packed)).split(25):
        part = collate([packed[row] for row in rows], pad)
        count = int(((part[2][:, 1:] == part[2][:, :-1]) & (part[2][:, 1:] >= 0)).sum())
        loss += loss_of(model, stage.see("val", rows), *part).item() * count
        num_words += count
    return loss / num_words


if __name__ == "__main__":
    main()
